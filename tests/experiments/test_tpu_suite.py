"""The TPU suite, in small on a CPU: its cases, and what it says of what is missing."""

import json

import pytest

from configs.devices import tpu_suite as config
from experiments import run
from experiments.devices import tpu_suite

CONFIG = {**config.get_config().to_dict(), "rehearse": True}
POINT = {name: value for name, value in CONFIG.items() if name not in ("grid", "workdir")}


def test_all_cases_are_cases():
    cases = [tpu_suite._parse(case) for case in CONFIG["grid"]["case"]]
    assert len({tuple(case.items()) for case in cases}) == len(cases)


@pytest.mark.full
def test_rehearsal(tmp_path):
    """One row of each kind; what is not there is a row that says so."""
    cases = (
        "tests",
        "attend eden_4 mosaic_tpu 8x2048x4",
        "attend v2_lean mosaic_tpu+pages 8x2048x4",
        "attend bfloat16 dot_product_attention 8x2048x4",
        "attend int8 paged 8x2048x4",
        "encode eden mosaic_tpu 4096",
        "decode eden mosaic_tpu 4096",
    )
    text = run.run({**CONFIG, "grid": {"case": cases}}, tmp_path).markdown
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    tests, eden, _, plain, paged, encoded, _ = (json.loads(line)["metrics"] for line in lines)
    assert "tests collected in" in tests["result"]
    assert eden["megabytes"] > 0
    assert eden["us"] > 0
    assert plain["megabytes"] == 2 * 256 * 2 * 128 * 2 / 1e6
    assert "note" in paged
    assert encoded["vectors"] == 32
    assert "Attention of one token" in text


@pytest.mark.parametrize("case", ["encod eden mosaic_tpu 1024", "attend v3_4 xla 8x4096", "encode eden mosaic_tpu n"])
def test_wrong_cases_are_refused(case):
    with pytest.raises(ValueError, match=r"expected a case like .* got '"):
        tpu_suite.check({**POINT, "case": case})


def test_it_needs_a_tpu():
    with pytest.raises(ValueError, match="the TPU suite needs a TPU, v5 or v6, and finds 'cpu'"):
        tpu_suite.check({**POINT, "rehearse": False, "case": "tests"})
