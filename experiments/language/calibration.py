"""Seconds and memory that it takes to fit quantizers to all layers and heads of a model."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.harness.table import Table
from experiments.language.model_memory import SHAPES, peak
from experiments.models import fitted
from rqjax.core import check_int
from rqjax.nn import Decoder, DecoderConfig

MADE_BY = ("rqjax/nn/calibration.py", "rqjax/recipes/klt.py")
TABLES = (
    Table(
        "Quantizers fitted to the keys and values of all layers and heads: seconds with compilation, seconds a layer"
        " without it, and GB of 10^9 bytes at most resident beyond the weights",
        rows=("strategy", "layers"),
        columns=(),
        values=("tokens", "first_seconds", "seconds_a_layer", "beyond_weights_gb"),
        each=("model",),
    ),
)


def check(point: dict[str, Any]) -> None:
    SHAPES[point["model"]]
    fitted.check(point["strategy"])
    check_int("layers", point["layers"], 1, 1000)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures so many layers of a model's shape with random weights, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (point,))


def _measure(point: dict[str, Any]) -> dict[str, float]:
    vocabulary = 512  # small, since keys and values do not depend on it
    fields = {**SHAPES[point["model"]], "num_hidden_layers": point["layers"], "vocab_size": vocabulary}
    decoder = Decoder(DecoderConfig.parse(fields), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    windows = point["tokens"] // point["context"]
    tokens = jax.random.randint(jax.random.key(0), (windows, point["context"]), 0, vocabulary)
    before, seconds = _resident(), []
    for seed in range(2):
        start = time.perf_counter()
        jax.block_until_ready(decoder.calibrate(tokens, point["strategy"], jax.random.key(seed)))
        seconds.append(time.perf_counter() - start)
    return {
        "first_seconds": seconds[0],
        "seconds_a_layer": seconds[1] / point["layers"],
        "beyond_weights_gb": peak() - before,
    }


def _resident() -> float:
    """Reads the GB of 10^9 bytes that are resident now."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1]) / 1e9
