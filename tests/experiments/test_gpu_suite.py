"""The GPU suite, in small on a CPU: its clock, its cases, what it says of what is missing."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from configs.devices import gpu_suite as config
from experiments import run
from experiments.devices import gpu_attention, gpu_clock, gpu_codes, gpu_steps, gpu_suite
from experiments.harness import published, table
from experiments.readme import ROOT

CONFIG = {**config.get_config().to_dict(), "rehearse": True}
SETTINGS = gpu_clock.Settings.of(CONFIG)
POINT = {name: value for name, value in CONFIG.items() if name not in ("grid", "workdir")}


def test_all_cases_are_cases():
    cases = [gpu_suite._parse(case) for case in CONFIG["grid"]["case"]]
    assert len({tuple(case.items()) for case in cases}) == len(cases)
    assert {case["vectors"] for case in cases if case.get("by") == "published"} == {1024, 4096, 8192, 16384}
    ours = {
        (case["operation"], case["method"]) for case in cases if case.get("by") == "mosaic_gpu" and "method" in case
    }
    assert ours == set(config.KERNELS)
    assert all(case["tokens"] % gpu_attention.SAMPLE == 0 for case in cases if "tokens" in case)
    assert {case["kind"] for case in cases if "kind" in case} == set(gpu_steps.SIZES)
    assert {name for name in gpu_codes.RECIPES} >= {case["method"] for case in cases if "method" in case}


@pytest.mark.full
def test_rehearsal(tmp_path, monkeypatch):
    """One row of each kind; what is not there is a row that says so."""
    monkeypatch.setattr(gpu_suite, "STARTED", time.monotonic())  # other tests have taken their time
    cases = ("copy", "encode rotor xla 1024", "encode rotor nothing 1024", "roundtrip dense published 1024")
    text = run.run({**CONFIG, "grid": {"case": cases}}, tmp_path).markdown
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    copied, encoded, missing, _ = (json.loads(line)["metrics"] for line in lines)
    assert encoded["vectors"] == 32
    assert encoded["bytes"] == 32 * (4 * 128 + 3 * 16 + 2)
    assert encoded["of_copy"] == pytest.approx(encoded["gb_per_second"] / copied["gb_per_second"])
    assert encoded["gb_per_second"] == pytest.approx(encoded["bytes"] / encoded["us"] / 1e3)
    assert missing["result"] == "-"
    assert "nothing" in missing["note"]
    assert "| roundtrip | dense | published |  | 69 us |" in text
    assert f"| {missing['note']} | encode rotor nothing 1024 |" in text


@pytest.mark.full
def test_rehearsal_of_whole_steps(tmp_path, monkeypatch):
    """Ratios are to the yardstick of the same run; a case of other sizes says what is expected."""
    monkeypatch.setattr(gpu_suite, "STARTED", time.monotonic())
    steps = ("append eden_4 rqjax 8x16", "step eden_4 rqjax 8x8192x4", "step bfloat16 cudnn 8x8192x4")
    cases = (*steps, "decoder eden_4 rqjax 8x8192", "search eden_unbiased rqjax 100000x1000")
    text = run.run({**CONFIG, "grid": {"case": cases}}, tmp_path).markdown
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(row["us"] > 0 for row in rows)
    assert rows[2]["vs_bfloat16"] == 1
    assert all(row["vs_bfloat16"] > 0 for row in (rows[1], rows[3]))
    assert [row["sizes"] in text for row in rows] == [True] * 5


@pytest.mark.full
def test_without_a_gpu_it_is_one_line():
    line = [sys.executable, "-m", "experiments.run", "--config=configs/devices/gpu_suite.py"]
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (last,) = done.stderr.splitlines()
    assert last.startswith("error: the GPU suite needs an NVIDIA GPU, Hopper or newer, and finds 'cpu'")


@pytest.mark.full
def test_tests_are_run_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    text = "import os\ndef test_a(): assert os.environ['JAX_PLATFORMS'] == 'cuda,cpu'\ndef test_b(): assert 0\n"
    (tmp_path / "test_some.py").write_text(text)
    done = gpu_suite.tests(("test_some.py",), 100, False, "cuda,cpu")
    assert done["failed"]
    assert done["result"].startswith("1 failed, 1 passed in")
    assert gpu_suite.tests(("test_some.py",), 100, True, "cuda,cpu")["result"].startswith("2 tests collected in")
    with pytest.raises(gpu_codes.Missing, match=r"there are no tests test_none\.py"):
        gpu_suite.tests(("test_some.py", "test_none.py"), 100, False, "cuda,cpu")


def test_time_left_is_respected():
    point = {**POINT, "case": "encode rotor xla 1024", "budget_s": -1}
    assert gpu_suite.run(point)["note"] == "no time left"


@pytest.mark.parametrize(
    "case",
    [
        "encod rotor xla 1024",
        "attend v3_4 xla 8x4096",
        "encode rotor xla",
        "encode rotor xla n",
        "step eden_4 rqjax 8x8",
    ],
)
def test_wrong_cases_are_refused(case):
    with pytest.raises(ValueError, match=r"expected a case like .* got '"):
        gpu_suite.check({**POINT, "case": case})


class Device:
    """A device of one queue, and a host whose time passes only as told."""

    def __init__(self):
        self.now = self.free = 0.0

    def launched(self, takes, host=1e-5):
        self.now += host
        self.free = max(self.free, self.now) + takes

    def wait(self, _):
        self.now = max(self.free, self.now)


def test_the_clock_measures_the_device(monkeypatch):
    device = Device()
    monkeypatch.setattr(gpu_clock.time, "perf_counter", lambda: device.now)
    clock = gpu_clock.Clock(lambda: device.launched(6e-3), device.wait, rounds=5)
    for takes in (5e-6, 3e-4):
        measured = clock.time([lambda takes=takes: device.launched(takes)] * 24)
        assert measured.us == pytest.approx(takes * 1e6)
        assert measured.spread == pytest.approx(0, abs=1e-6)
        assert measured.queued


def test_the_clock_tells_when_the_host_is_in_the_time(monkeypatch):
    device = Device()
    monkeypatch.setattr(gpu_clock.time, "perf_counter", lambda: device.now)
    clock = gpu_clock.Clock(lambda: device.launched(6e-3), device.wait, rounds=5)

    def synchronous():
        device.launched(5e-6)
        device.wait(None)

    measured = clock.time([synchronous] * 24)
    assert not measured.queued
    assert 5 < measured.us <= 15.1


@pytest.mark.parametrize(
    ("read", "moved", "calls", "sets"),
    [(2**19, 2**19, 24, 24), (2**27, 2**28, 24, 2), (2**31, 2**32, 3, 1), (2**24, 2**25, 24, 15), (2**35, 2**35, 3, 1)],
)
def test_inputs_exceed_the_cache(read, moved, calls, sets):
    assert gpu_clock.counts(SETTINGS, read, moved) == (calls, sets)


@pytest.mark.parametrize("method", gpu_codes.RECIPES)
def test_bytes_that_are_counted_are_those_of_the_arrays(method):
    shapes = jax.eval_shape(lambda: gpu_codes.RECIPES[method](jax.random.key(0), 128, 3))
    vectors, codes = 64 * 128 * 4, 64 * shapes.bits_per_vector // 8
    assert gpu_codes.moved("encode", method, 64, POINT) == (vectors, vectors + codes)
    assert gpu_codes.moved("decode", method, 64, POINT) == (codes, vectors + codes)
    assert gpu_codes.moved("roundtrip", method, 64, POINT) == (vectors, 2 * vectors)


@pytest.mark.full
def test_a_repeated_cache_is_the_cache_of_repeated_tokens():
    shape = gpu_attention.Shape(batch=2, tokens=2 * gpu_attention.SAMPLE, groups=2, heads=2, dim=32)
    made = gpu_attention.filled("v3_4", shape)
    sinks, sample = gpu_attention.SINKS, gpu_attention.SAMPLE
    length = sample + sinks + gpu_attention.WINDOW
    k, v = jax.random.normal(jax.random.key(2), (2, 1, length, shape.heads, shape.dim), jnp.bfloat16)
    coded = slice(sinks, sinks + sample)
    k, v = (jnp.concatenate([x[:, :sinks], x[:, coded], x[:, coded], x[:, coded.stop :]], 1) for x in (k, v))
    k, v = (jnp.tile(x, (2, 1, 1, 1)) for x in (k, v))
    strategy = rqjax.strategy("v3_4", jax.random.key(1), shape.dim)
    options = {"window": gpu_attention.WINDOW, "sinks": sinks}
    real = jax.jit(rqjax.append)(strategy.cache(2, shape.heads, k.shape[1], **options), k, v)
    assert jax.tree.structure(made) == jax.tree.structure(real)
    jax.tree.map(np.testing.assert_array_equal, made, real)


def test_published_times_have_the_published_ratios():
    """RotorQuant, Table 2: 11x, 11x, 14x, 19x."""
    dense, rotor = (published.QUANTIZE_US[name].values() for name in ("dense", "rotor"))
    ratios = [d / r for d, r in zip(dense, rotor, strict=True)]
    np.testing.assert_allclose(ratios, [11, 11, 14, 19], atol=0.51)


def test_tables_show_the_rows_that_have_their_value():
    rows = [
        {"point": {"x": i}, "metrics": {"e": i, **extra}, "environment": {}} for i, extra in enumerate(({}, {"m": 1}))
    ]
    assert table.render(rows, [table.Table("T", ("x",), (), ("e",), having="m")]) == (
        "### T\n\n| x | e |\n| --- | ---: |\n| 1 | 1 |\n"
    )
