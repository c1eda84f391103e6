"""Mean squared error of every method: RotorQuant's Table 4 and TurboQuant's Figure 3."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import rqjax
from experiments.data import samples
from experiments.harness import plot as plots, published
from experiments.harness.table import Row, Table
from rqjax import metrics, theory

MADE_BY = ("experiments/data/samples.py", "rqjax/recipes/methods.py", "rqjax/metrics.py")
TABLES = (
    Table(
        "Relative mean squared error",
        rows=("method",),
        columns=("bits",),
        values=("mse", "published", "stored_bits"),
        footers=("lower_bound", "upper_bound"),
        each=("data", "dim"),
    ),
)


def check(point: dict[str, Any]) -> None:
    """Fails on a point that cannot run, before the first one does."""
    samples.check(point["data"])
    dim = samples.dimension(point)
    jax.eval_shape(lambda key: rqjax.METHODS[point["method"]](key, dim, point["bits"]), jax.random.key(0))


def run(point: dict[str, Any]) -> dict[str, Any]:
    method, dim, bits = point["method"], samples.dimension(point), point["bits"]
    recipe = rqjax.METHODS[method]
    result = distortion(method, recipe, point)
    seen = point["data"] == "sphere" and dim == 128
    return {
        **result,
        "published": published.MSE.get(method, {}).get(bits) if seen else None,
        "lower_bound": theory.shannon_bound(bits),
        "upper_bound": theory.mse_bound(bits),
    }


def distortion(name: str, recipe: Callable[..., rqjax.Quantizer], point: dict[str, Any]) -> dict[str, Any]:
    """Measures relative squared error (mean, deviation over the seeds), cosine, stored bits a coordinate, and
    `over_shannon`."""
    dim = samples.dimension(point)
    x = samples.sample(point["data"], point["seeds"], point["n"], dim)
    keys = jax.random.split(jax.random.key(0), point["seeds"])
    mse, cosine = _measure(name, recipe, dim, point["bits"])(keys, x)
    quantizer = jax.eval_shape(lambda key: recipe(key, dim, point["bits"]), keys[0])
    mean, deviation = float(mse.mean()), float(mse.std(ddof=1)) if len(mse) > 1 else None
    stored = quantizer.bits_per_vector / dim
    return {
        "mse": mean,
        "mse_sd": deviation,
        "cosine": float(cosine.mean()),
        "stored_bits": stored,
        "dim": dim,
        **over_shannon(stored, mean, deviation),
    }


def over_shannon(stored: float, mse: float, deviation: float | None = None) -> dict[str, float | None]:
    """Divides an error by Shannon's bound at the bits that are stored, norms and scales included."""
    bound = theory.shannon_bound(stored)
    return {"over_shannon": mse / bound, "over_shannon_sd": None if deviation is None else deviation / bound}


@functools.cache
def _measure(name: str, recipe: Callable[..., rqjax.Quantizer], dim: int, bits: int):
    """Compiles once for a method: the data sets share it."""

    def one(key, x):
        quantizer = recipe(key, dim, bits)
        decoded = quantizer.decode(quantizer.encode(x))
        return metrics.relative_mse(x, decoded), metrics.cosine(x, decoded)

    return jax.jit(jax.vmap(one))


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots error against stored bits, one panel for each data set, between Shannon's bound and TurboQuant's.

    Of many methods and data sets a choice is drawn, and every method that is not of rqjax.
    """
    choice = {
        "method": (
            *("identity", "turboquant", "rotorquant", "rotorquant_paper", "eden", "nested_e8", "turboquant_trellis"),
            *("affine", *(name for name in rqjax.METHODS if not hasattr(rqjax, name))),
        ),
        "data": ("sphere", "outlier_channels", "words", "decaying_spectrum"),
    }
    for name, some in choice.items():
        named = tuple(dict.fromkeys(row["point"][name] for row in rows))
        choice[name] = named if len(named) <= len(some) else some
    most, norm = max(row["point"]["bits"] for row in rows) + 0.6, 16 / rows[0]["metrics"]["dim"]
    shown = [
        row
        for row in rows
        if all(row["point"][name] in some for name, some in choice.items())
        and row["metrics"]["stored_bits"] < most  # the published RotorQuant takes up to 14
    ] or rows
    lines = {
        "Shannon": lambda x, _: theory.shannon_bound(x),
        "TurboQuant's Theorem 1": lambda x, _: theory.mse_bound(x - norm),  # of unit vectors: a norm comes on top
    }
    style: dict[str, Any] = {"series": "method", "panel": "data", "log": True, "published": "published", "lines": lines}
    note = "bars: deviation over draws"
    return [plots.curves(shown, folder / "mse.png", x="stored_bits", y="mse", note=note, **style)]
