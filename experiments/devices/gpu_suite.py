"""Tests and benchmarks of the GPU kernels in one run: `configs/devices/gpu_suite.py` has the command and what it shows.

A case is one row: "tests", "copy", "<operation> <method> <by> <vectors>",
"attend <cache> <by> <batch>x<tokens>x<query heads a KV head>", or one of `gpu_steps.SIZES`, as
"step <cache> <by> <batch>x<tokens>x<query heads a KV head>". A case that cannot be measured says so in its row.
"""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the tests and torch need memory too

import jax
import jax.numpy as jnp

import experiments
from experiments.devices import gpu_attention, gpu_clock, gpu_codes, gpu_steps
from experiments.harness import published
from experiments.harness.table import Table
from rqjax.backends import hopper

ROOT = Path(__file__).parents[2]
STARTED = time.monotonic()
MADE_BY = ("experiments/devices/gpu_*.py", "pallas_kernels/gpu/*.py", "rqjax/backends/hopper*.py")
TABLES = (
    Table("Tests on the device, and its copy bandwidth", ("alone",), (), ("result",), having="alone"),
    Table(
        "Codes: microseconds, share of the copy bandwidth, times as fast as the dense pipeline in torch",
        rows=("operation", "method", "by"),
        columns=("vectors",),
        values=("result",),
        having="operation",
    ),
    Table(
        "Attention of one token: microseconds, share of the copy bandwidth, times as fast as from bfloat16",
        rows=("batch", "tokens", "groups"),
        columns=("cache", "by"),
        values=("result",),
        having="cache",
    ),
    Table(
        "Whole steps: microseconds, launches, times as fast as with bfloat16 by cuDNN",
        rows=("kind", "name", "by", "sizes"),
        columns=(),
        values=("result", "kernels"),
        having="kind",
    ),
    Table("What is missing, the last case of each kind", ("note",), (), ("case",), having="note"),
)
SMALL = {
    **{"vectors": 32, "queries": 2, "tokens": 256, "time": 16, "batch": 1, "rounds": 1, "calls": 2, "steps": 2},
    **{"occupy_mib": 1, "copy_mib": 1, "model": "1 layers of Llama 3.2 3B"},
}
"""Sizes of a rehearsal."""


def check(point: dict[str, Any]) -> None:
    _parse(point["case"])
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 9
    if not hopper and not point["rehearse"]:
        raise ValueError(
            f"the GPU suite needs an NVIDIA GPU, Hopper or newer, and finds {device.device_kind!r}; "
            "--config.rehearse=True tries it in small on what there is"
        )


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one case. If it fails, its row says why, and the others still run."""
    values = _parse(point["case"])
    if values.get("by") == "published":
        return {**values, "result": f"{published.QUANTIZE_US[values['method']][values['vectors']]} us"}
    if point["rehearse"]:
        point = {**point, **SMALL}
        values = {name: min(value, SMALL[name]) if name in SMALL else value for name, value in values.items()}
    if time.monotonic() - STARTED > point["budget_s"]:
        return {**values, "result": "-", "note": "no time left"}
    try:
        with _interpreted(point["rehearse"] and values.get("by") == "mosaic_gpu"):
            return {**values, **_measure(values, point)}
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, SubprocessError) as error:
        note = experiments.one_line(error) or type(error).__name__
        return {**values, "result": "-", "note": note[:200]}


def _parse(case: str) -> dict[str, Any]:
    """Parses the values of a case."""
    match case.split():
        case ["tests" | "copy"]:
            return {"alone": case}
        case ["attend", cache, by, shape] if re.fullmatch(r"\d+x\d+x\d+", shape):
            sizes = dict(zip(("batch", "tokens", "groups"), map(int, shape.split("x")), strict=True))
            return {"cache": cache, "by": by, **sizes}
        case [kind, name, by, shape] if kind in gpu_steps.SIZES and re.fullmatch(r"\d+(x\d+)*", shape):
            sizes, names = [int(size) for size in shape.split("x")], gpu_steps.SIZES[kind]
            if len(sizes) == len(names):
                return {"kind": kind, "name": name, "by": by, "sizes": shape, **dict(zip(names, sizes, strict=True))}
        case [operation, method, by, n] if operation in gpu_codes.OPERATIONS and n.isdigit():
            return {"operation": operation, "method": method, "by": by, "vectors": int(n)}
    raise ValueError(
        f"expected a case like 'tests', 'copy', 'encode rotor mosaic_gpu 4096' or 'attend v3_4 mosaic_gpu 8x4096x4', "
        f"got {case!r}"
    )


@contextlib.contextmanager
def _interpreted(wanted: bool) -> Iterator[None]:
    """Interprets kernels in a rehearsal on a CPU."""
    if not wanted or jax.default_backend() == "gpu":
        yield
        return
    token = hopper.INTERPRET.set(hopper.kernel("mosaic").interpreter(detect_races=False))
    try:
        yield
    finally:
        hopper.INTERPRET.reset(token)


def _measure(values: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    if point["case"] == "tests":
        return tests(tuple(point["tests"]), point["tests_timeout_s"], point["rehearse"], "cuda,cpu")
    if "kind" in values:
        metrics = gpu_steps.measure(values, point)
        launches, ratio = metrics.get("launches"), metrics.get("vs_bfloat16")
        shown = [f"{_us(metrics)} us", f"{launches:.0f} launches" if launches else "", f"{ratio:.2f}x" if ratio else ""]
        return {**metrics, "result": ", ".join(filter(None, shown))}
    copied = copy_gb_per_second(point["copy_mib"], gpu_clock.Settings.of(point))
    if point["case"] == "copy":
        return {"result": f"{copied:,.0f} GB/s", "gb_per_second": copied}
    metrics = (gpu_attention if "cache" in values else gpu_codes).measure(values, point)
    ratio = metrics.get("vs_dense") or metrics.get("vs_bfloat16")
    share = metrics["gb_per_second"] / copied
    shown = [f"{_us(metrics)} us", f"{share:.0%}", f"{ratio:.2g}x" if ratio else ""]
    return {**metrics, "of_copy": share, "result": " ".join(filter(None, shown))}


def _us(metrics: dict[str, Any]) -> str:
    """Formats microseconds, with a star if the function waits for the host."""
    us = metrics["us"]
    return (f"{us:,.0f}" if us >= 100 else f"{us:.3g}") + ("" if metrics["queued"] else "*")


@functools.cache
def copy_gb_per_second(mib: int, settings: gpu_clock.Settings) -> float:
    """Measures the bandwidth, read and written, of a copy in the memory of the device."""
    x = jax.random.normal(jax.random.key(1), (mib * 2**18,))
    calls = gpu_clock.over(jax.jit(jnp.copy), [(x,)], 3)
    return 2 * x.nbytes / gpu_clock.of_jax(settings).time(calls).us / 1e3


def tests(files: tuple[str, ...], timeout: float, rehearse: bool, devices: str) -> dict[str, Any]:
    """Runs the kernels' tests in a process whose jax has the devices, so that nothing is interpreted.

    A rehearsal only collects them.
    """
    if missing := [name for name in files if not (ROOT / name).exists()]:
        raise gpu_codes.Missing(f"there are no tests {', '.join(missing)}")
    line = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", *files]
    environment = os.environ if rehearse else {**os.environ, "JAX_PLATFORMS": devices}
    start = time.perf_counter()
    done = subprocess.run(
        [*line, *(["--collect-only"] if rehearse else [])],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    last = (done.stdout.strip() or done.stderr.strip() or "pytest said nothing").splitlines()[-1]
    return {"result": last.strip("= "), "failed": bool(done.returncode), "test_seconds": time.perf_counter() - start}


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots the share of the copy bandwidth, and attention against bfloat16; nothing if matplotlib is missing."""
    try:
        from experiments.harness import plot as plots
    except ImportError:
        return []
    paths = []
    for name, x, y, label, panel in (
        ("codes", "vectors", "of_copy", "{method} {by}", "operation"),
        ("attention", "tokens", "vs_bfloat16", "{cache} {by}, {batch} x {groups}", "cache"),
    ):
        shown = [row["metrics"] for row in rows if all(row["metrics"].get(name) for name in (x, y, panel))]
        points = [
            {"point": {}, "metrics": {**m, f"log2 {x}": math.log2(m[x]), "series": label.format(**m)}} for m in shown
        ]
        if points:
            path = folder / f"{name}.png"
            paths.append(plots.curves(points, path, x=f"log2 {x}", y=y, series="series", panel=panel))
    return paths
