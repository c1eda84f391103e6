"""Inner products estimated from codes: RotorQuant's Table 5 and TurboQuant's Figures 1 and 2."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.codes.distortion import check as check
from experiments.data import samples
from experiments.harness import plot as plots, published
from experiments.harness.table import Row, Table
from rqjax import metrics, theory

MADE_BY = ("experiments/data/samples.py", "rqjax/recipes/methods.py", "rqjax/metrics.py")
TABLES = (
    Table(
        "Inner products of pairs of unit vectors, estimated from the codes of one",
        rows=("bits", "method"),
        columns=(),
        values=(
            "stored_bits",
            "bias",
            "published_bias",
            "rmse",
            "published_rmse",
            "correlation",
            "published_correlation",
            "slope",
            "d_variance",
            "lower_bound",
            "upper_bound",
        ),
        each=("data", "dim"),
    ),
)

EDGES = np.linspace(-0.15, 0.15, 61)
"""Edges of the histogram of errors."""
MEANS = np.linspace(0, 0.9, 10)
"""Inner products around which the bias is measured, as cosines."""


def run(point: dict[str, Any]) -> dict[str, Any]:
    method, bits, seeds, dim = point["method"], point["bits"], point["seeds"], samples.dimension(point)
    x = samples.sample(point["data"], seeds, 2 * point["n"], dim)
    x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in jnp.split(x, 2, axis=1))
    keys = jax.random.split(jax.random.key(0), seeds)
    values, errors, bias_at = _measure(method, dim, bits)(keys, x, y)
    result: dict[str, Any] = {}
    for name, value in values.items():
        result |= {name: float(value.mean()), f"{name}_sd": float(value.std(ddof=1)) if seeds > 1 else None}
    seen = published.INNER_PRODUCT.get(method, {}).get(bits) if (point["data"], dim) == ("sphere", 128) else None
    for name, value in zip(("bias", "rmse", "correlation"), seen or (None,) * 3, strict=True):
        result[f"published_{name}"] = value
    return {
        **result,
        "dim": dim,
        "stored_bits": jax.eval_shape(lambda k: rqjax.METHODS[method](k, dim, bits), keys[0]).bits_per_vector / dim,
        "lower_bound": dim * theory.inner_product_lower_bound(dim, bits),
        "upper_bound": dim * theory.inner_product_bound(dim, bits),
        "histogram": np.histogram(np.asarray(errors), EDGES)[0].tolist(),
        "bias_at": np.asarray(bias_at.mean(0)).tolist(),
    }


@functools.cache
def _measure(method: str, dim: int, bits: int):
    def one(key, x, y):
        quantizer = rqjax.METHODS[method](key, dim, bits)
        decoded = quantizer.decode(quantizer.encode(x))
        true, estimate = jnp.sum(x * y, -1), jnp.sum(decoded * y, -1)
        values = {
            "bias": metrics.bias(true, estimate),
            "rmse": metrics.rmse(true, estimate),
            "correlation": metrics.correlation(true, estimate),
            "slope": jnp.mean(jnp.sum(x * decoded, -1)),  # <x, x~> of unit vectors: the factor on any inner product
            "d_variance": dim * jnp.var(estimate - true),
        }
        # queries with a given cosine to x, the same data otherwise
        across = y - true[:, None] * x
        across = across / jnp.linalg.norm(across, axis=-1, keepdims=True)
        bias_at = jnp.stack(
            [jnp.mean(jnp.sum(decoded * (c * x + (1 - c**2) ** 0.5 * across), -1)) - c for c in MEANS.tolist()]
        )
        return values, estimate - true, bias_at

    return jax.jit(jax.vmap(one))


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots histograms of the error, and the bias against the mean inner product."""
    return [
        plots.curves(
            _series(rows, "histogram", (EDGES[1:] + EDGES[:-1]) / 2, "error of the inner product", "pairs"),
            folder / "histogram.png",
            x="error of the inner product",
            y="pairs",
            series="method",
            panel="panel",
            width=len({row["point"]["data"] for row in rows}),
        ),
        plots.curves(
            _series(rows, "bias_at", MEANS, "mean inner product", "bias"),
            folder / "bias.png",
            x="mean inner product",
            y="bias",
            series="method",
            panel="panel",
            width=len({row["point"]["data"] for row in rows}),
        ),
    ]


def _series(rows: Sequence[Row], name: str, xs: np.ndarray, x: str, y: str) -> list[Row]:
    """Makes one row for each value of a list-valued metric."""
    return [
        {
            "point": {**row["point"], "panel": f"{row['point']['data']}, {row['point']['bits']} bits"},
            "metrics": {x: float(a), y: b},
            "environment": {},
        }
        for row in rows
        for a, b in zip(xs, row["metrics"][name], strict=True)
    ]
