"""Variance within leaves after levels of exchange, beside what QET's Theorem 2 says of the first level."""

import functools
from typing import Any

import jax
import numpy as np

from experiments.data import samples
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from rqjax.quantizers.exchange import exchange

MADE_BY = ("experiments/data/samples.py", "rqjax/quantizers/exchange.py")
TABLES = (
    Table(
        "Variance within leaves after levels of exchange, relative to none",
        rows=("levels",),
        columns=("data",),
        values=("variance", "theorem_2"),
    ),
)


def check(point: dict[str, Any]) -> None:
    samples.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    x = samples.sample(point["data"], point["seeds"], point["n"], point["dim"])
    levels = point["levels"]
    return {
        **mean_and_deviation({"variance": np.asarray(_within(x, levels) / _within(x, 0))}),
        "theorem_2": 1 - 1 / np.pi if levels == 1 and point["data"] == "gaussian" else None,
    }


@functools.partial(jax.jit, static_argnums=1)
def _within(x: jax.Array, levels: int) -> jax.Array:
    """Mean variance of the numbers of a leaf, for each seed."""
    y, _ = exchange(x, levels)
    return y.reshape(*x.shape[:2], 2**levels, -1).var(axis=(1, 3)).mean(axis=1)
