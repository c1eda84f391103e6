"""Inner products estimated from codes: RotorQuant's Table 5; biases and variances of TurboQuant's Figures 1 to 3."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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


def run(point: dict[str, Any]) -> dict[str, Any]:
    method, bits, seeds, dim = point["method"], point["bits"], point["seeds"], samples.dimension(point)
    x = samples.sample(point["data"], seeds, 2 * point["n"], dim)
    x, y = (v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in jnp.split(x, 2, axis=1))
    keys = jax.random.split(jax.random.key(0), seeds)
    values = _measure(method, dim, bits)(keys, x, y)
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
    }


@functools.cache
def _measure(method: str, dim: int, bits: int):
    def one(key, x, y):
        quantizer = rqjax.METHODS[method](key, dim, bits)
        decoded = quantizer.decode(quantizer.encode(x))
        true, estimate = jnp.sum(x * y, -1), jnp.sum(decoded * y, -1)
        return {
            "bias": metrics.bias(true, estimate),
            "rmse": metrics.rmse(true, estimate),
            "correlation": metrics.correlation(true, estimate),
            "slope": jnp.mean(jnp.sum(x * decoded, -1)),  # <x, x~> of unit vectors: the factor on any inner product
            "d_variance": dim * jnp.var(estimate - true),
        }

    return jax.jit(jax.vmap(one))


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots what inner products shrink by, their bias in units of the mean, and the variance of their error."""
    shown = [
        {
            "point": {**row["point"], "panel": f"{row['point']['data']}, {row['point']['bits']}-bit"},
            "metrics": {
                **row["metrics"],
                "shrinkage": 1 - row["metrics"]["slope"],
                "shrinkage_sd": row["metrics"].get("slope_sd"),
                "published": None
                if (rmse := row["metrics"].get("published_rmse")) is None
                else row["metrics"]["dim"] * rmse**2,
            },
        }
        for row in sorted(rows, key=lambda row: row["point"]["data"])
    ]
    norm = 16 / rows[0]["metrics"]["dim"]
    bounds = {
        "Theorem 3": lambda x, _: theory.inner_product_lower_bound(1, x),
        "Theorem 2": lambda x, _: theory.inner_product_bound(1, x - 2 * norm),  # a norm and a sketch's norm on top
    }
    style: dict[str, Any] = {"series": "method", "note": "bars: deviation over draws"}
    return [
        plots.dots(shown, folder / "bias.png", x="shrinkage", panel="panel", log=False, **style),
        plots.curves(
            [row for row in shown if row["metrics"]["stored_bits"] < 6],  # the published RotorQuant takes up to 12
            folder / "variance.png",
            x="stored_bits",
            y="d_variance",
            panel="data",
            log=True,
            published="published",
            lines=bounds,
            **style,
        ),
    ]
