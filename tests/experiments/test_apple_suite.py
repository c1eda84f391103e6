"""The Apple suite, in small on a CPU."""

import json
import os
import subprocess
import sys

import pytest

from configs.devices import apple_suite as config
from experiments import run
from experiments.devices import apple_suite
from experiments.harness import published
from experiments.readme import ROOT

CONFIG = {**config.get_config().to_dict(), "rehearse": True}
POINT = {name: value for name, value in CONFIG.items() if name != "grid"}


def test_all_cases_are_published():
    cases = [apple_suite._parse(case) for case in CONFIG["grid"]["case"]]
    assert {case["vectors"] for case in cases if "vectors" in case} == set(published.QUANTIZE_MS_M4["dense"])
    generated = {(case["strategy"], case["tokens"]) for case in cases if "strategy" in case}
    assert generated == {(name, n) for name in config.STRATEGIES for n in published.TOKENS_PER_SECOND[name]}
    assert set(config.STRATEGIES) == set(published.TOKENS_PER_SECOND) - {"float16"}


def test_published_times_have_the_published_ratios():
    """RotorQuant, Table 3: 1.6x, 9.3x, 19.6x, 31.3x."""
    dense, rotor = (published.QUANTIZE_MS_M4[name].values() for name in ("dense", "rotor"))
    assert [round(d / r, 1) for d, r in zip(dense, rotor, strict=True)] == [1.6, 9.3, 19.6, 31.3]


@pytest.mark.full
def test_rehearsal(tmp_path, monkeypatch):
    """A row of each kind; what fails says so, and the others run."""
    monkeypatch.setitem(apple_suite.SMALL, "dim", 64)
    cases = ("quantize 4096", "generate v2_lean 8192")
    text = run.run({**CONFIG, "grid": {"case": cases}}, tmp_path).markdown
    quantized, generated = (json.loads(line)["metrics"] for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert quantized["speedup"] == pytest.approx(quantized["dense_ms"] / quantized["rotor_ms"])
    assert quantized["published_rotor_ms"] == 0.65
    assert generated["vs_float16"] > 0
    assert generated["published_vs_float16"] == pytest.approx(156 / 148)
    assert text.count("\n### ") + text.startswith("### ") == 2
    failed = apple_suite.run({**POINT, "case": "generate v2_lean 512", "weights": "float17"})
    assert "note" not in failed or "float17" in failed["note"]
    monkeypatch.setitem(apple_suite.SMALL, "model", "1 layers of Llama 3.2 3B")
    failed = apple_suite.run({**POINT, "case": "generate v2_lean 512", "weights": "float17"})
    assert failed["note"] == "data type 'float17' not understood"


@pytest.mark.parametrize("case", ["quantize 5000", "quantise 4096", "generate v2_lean 100", "generate v4 512"])
def test_wrong_cases_are_refused(case):
    with pytest.raises(ValueError, match=r"expected a published case like .* got '"):
        apple_suite.check({**POINT, "case": case})


@pytest.mark.full
def test_elsewhere_it_is_one_line():
    line = [sys.executable, "-m", "experiments.run", "--config=configs/devices/apple_suite.py"]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 1
    (last,) = done.stderr.splitlines()
    assert last.startswith("error: the Apple suite needs jax-mps or jax-metal on a Mac, and finds 'cpu'")
