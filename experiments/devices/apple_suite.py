"""RotorQuant's table of Metal shaders and TurboQuant MLX's table of tokens per second, on Apple's devices.

`configs/devices/apple_suite.py` has the command and what it shows. A case is one row: "quantize <vectors>" or
"generate <strategy> <tokens>". A case that cannot be measured says so in its row.
"""

from typing import Any

import jax
import numpy as np

import experiments
import rqjax
from experiments.harness import published
from experiments.harness.table import Table
from experiments.harness.timing import turns
from experiments.language import generation_throughput
from rqjax.core import platforms

MADE_BY = ("rqjax/recipes/methods.py", "rqjax/recipes/strategies.py")
TABLES = (
    Table(
        "Quantizing and reconstructing, d = 128, 3 bits: milliseconds; published: a Mac mini M4, PyTorch and a Metal"
        " shader",
        rows=("vectors",),
        columns=(),
        values=("dense_ms", "rotor_ms", "speedup", "published_dense_ms", "published_rotor_ms", "published_speedup"),
        having="vectors",
    ),
    Table(
        "Whole decoders: tokens per second, and how many times as fast as with a float16 cache; published: an M4 Max,"
        " MLX, weights of 4 bits",
        rows=("tokens", "strategy"),
        columns=(),
        values=("tokens_per_second", "vs_float16", "published_tokens_per_second", "published_vs_float16"),
        having="strategy",
    ),
    Table("What is missing", ("case",), (), ("note",), having="note"),
)
SMALL = {"vectors": 64, "tokens": 64, "model": "qwen2-d64", "rounds": 1}
"""Sizes of a rehearsal."""


def check(point: dict[str, Any]) -> None:
    values = _parse(point["case"])
    if "strategy" in values:
        generation_throughput.check(values)
    if not (platforms.on_apple() or point["rehearse"]):
        raise ValueError(
            f"the Apple suite needs jax-mps or jax-metal on a Mac, and finds {platforms.platform()!r}; "
            "--config.rehearse=True tries it in small on what there is"
        )


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one case. If it fails, its row says why, and the others still run."""
    values = _parse(point["case"])
    point = {**point, **values, **(SMALL if point["rehearse"] else {})}
    try:
        return {**values, **(_generate if "strategy" in values else _quantize)(point, values)}
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        return {**values, "note": (experiments.one_line(error) or type(error).__name__)[:200]}


def _quantize(point: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    x = jax.device_put(np.random.default_rng(0).standard_normal((point["vectors"], point["dim"]), np.float32))
    roundtrip = jax.jit(rqjax.roundtrip)
    calls = {}
    for name, method in (("dense", "turboquant"), ("rotor", "rotorquant")):
        quantizer = rqjax.METHODS[method](jax.random.key(0), point["dim"], point["bits"])
        calls[name] = lambda quantizer=quantizer: roundtrip(quantizer, x)
    ms = {name: 1e3 * float(np.median(times[2:])) for name, times in turns(calls, point["rounds"] + 2).items()}
    there = {name: published.QUANTIZE_MS_M4[name][values["vectors"]] for name in calls}
    return {
        "dense_ms": ms["dense"],
        "rotor_ms": ms["rotor"],
        "speedup": ms["dense"] / ms["rotor"],
        "published_dense_ms": there["dense"],
        "published_rotor_ms": there["rotor"],
        "published_speedup": there["dense"] / there["rotor"],
    }


def _generate(point: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    there = {name: published.TOKENS_PER_SECOND[name][values["tokens"]] for name in ("float16", values["strategy"])}
    measured = generation_throughput.run(point)
    return {
        "tokens_per_second": measured["tokens_per_second"],
        "vs_float16": measured["vs_float16"],
        "published_tokens_per_second": there[values["strategy"]],
        "published_vs_float16": there[values["strategy"]] / there["float16"],
    }


def _parse(case: str) -> dict[str, Any]:
    """Parses the values of a case."""
    match case.split():
        case ["quantize", n] if n.isdigit() and int(n) in published.QUANTIZE_MS_M4["rotor"]:
            return {"vectors": int(n)}
        case ["generate", name, n] if n.isdigit() and int(n) in published.TOKENS_PER_SECOND.get(name, {}):
            return {"strategy": name, "tokens": int(n)}
    raise ValueError(f"expected a published case like 'quantize 4096' or 'generate v2_lean 8192', got {case!r}")
