"""Kernels compile for TPUs v5e and v6e, no larger and slower than they were; XLA programs compile for the v5e.

Needs no TPU, but its compiler: `make tpu-compile-env`. `python -m tests.tools.tpu` shows the numbers.
"""

import pytest

from tests.tools import programs, tpu

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def kernels():
    return tpu.compiled("tpu_compile", list(tpu.TESTED))


@pytest.fixture(scope="module")
def golden():
    """Goldens of this jax, or of the newest before it."""
    of, version = tpu.goldens(), tpu.jax_version()
    known = [v for v in of if tpu.release(v) <= tpu.release(version)]
    return of[max(known, key=tpu.release)]


def test_kernels(kernels, golden):
    worse = [line for name, record in kernels.items() for line in tpu.complaints(name, record, golden.get(name))]
    assert not worse, "; ".join(worse) + ": if it must be so, renew tpu.json by `make goldens`"
    assert sorted(golden) == sorted(kernels), "a golden is left over: renew them by `make goldens`"


def test_attention_needs_no_memory_beside_the_codes(kernels):
    for name, record in kernels.items():
        assert all(now["temporary"] == 0 for now in record.values()), name


def test_programs():
    """Some of the programs, which compile for GPUs."""
    names = list(programs.PROGRAMS)[1::12]
    found = tpu.compiled("tpu_programs", names)
    assert sorted(found) == sorted(names)
    assert {name: now for name, now in found.items() if set(now.values()) != {"compiles"}} == {}


def test_complaints():
    good = {"v5e": {"code": 1000, "temporary": 0, "step": 100, "head": 10}}
    assert tpu.complaints("n", good, good) == []
    assert tpu.complaints("n", good, None) == ["n, v5e: has no golden"]
    assert tpu.complaints("n", {"v5e": {"error": "no such layout"}}, good) == ["n, v5e: no such layout"]
    grown = {"v5e": {"code": 1101, "temporary": 1, "step": 110, "head": 10}}
    assert tpu.complaints("n", grown, good) == [
        "n, v5e: code grew from 1000 to 1101",
        "n, v5e: temporary grew from 0 to 1",
    ]


def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("RQJAX_TPU_COMPILE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no compiler .* run `make tpu-compile-env`"):
        tpu.compiled("tpu_compile", [])
