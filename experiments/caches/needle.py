"""Needle in a haystack, in vector form: RotorQuant's section 5.5."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table

MADE_BY = ("rqjax/recipes/methods.py",)
TABLES = (
    Table(
        "Needles whose key scores highest, of all that were looked for",
        rows=("similarity", "method"),
        columns=("context", "bits"),
        values=("found",),
    ),
)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Finds needles among random unit keys by their codes; the query has cosine `similarity` with the needle."""
    dim, context, similarity = point["dim"], point["context"], point["similarity"]

    def found(key):
        keys = jax.random.split(key, 4)
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
        hay = unit(jax.random.normal(keys[0], (context, dim)))
        places = jax.random.choice(keys[1], context, (point["needles"],), replace=False)
        noise = jax.random.normal(keys[2], (point["needles"], dim))
        noise = unit(noise - (noise * hay[places]).sum(-1, keepdims=True) * hay[places])
        queries = similarity * hay[places] + (1 - similarity**2) ** 0.5 * noise
        quantizer = rqjax.METHODS[point["method"]](keys[3], dim, point["bits"])
        return (quantizer.dot(queries, quantizer.encode(hay)).argmax(-1) == places).mean()

    rates = jax.jit(jax.vmap(found))(jax.random.split(jax.random.key(0), point["seeds"]))
    return mean_and_deviation({"found": rates})


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots what is found with the fewest bits by queries that are not the keys themselves: else nearly all are."""
    least = min(row["point"]["bits"] for row in rows)
    shown = [
        {**row, "point": {**row["point"], "panel": f"{least} bits, cosine of query and key {similarity:g}"}}
        for row in rows
        if row["point"]["bits"] == least and (similarity := row["point"]["similarity"]) < 1
    ]
    style: dict[str, Any] = {"series": "method", "panel": "panel", "note": "bars: deviation over draws"}
    return [plots.curves(shown, folder / "found.png", x="context", y="found", **style)] if shown else []
