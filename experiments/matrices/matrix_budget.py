"""Matrices quantized under a memory budget: error and time of each method at each compression ratio."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.harness import plot as plots, published
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Row, Table
from experiments.matrices import matrices
from experiments.matrices.matrices import matrix, word_bits
from rqjax.recipes.budget import method

MADE_BY = (
    "experiments/matrices/matrices.py",
    "rqjax/recipes/budget.py",
    "rqjax/quantizers/product.py",
    "rqjax/quantizers/exchange.py",
)
TABLES = (
    Table(
        "Mean squared error in % of product quantization's in the same bytes",
        rows=("ratio",),
        columns=("method",),
        values=("vs_pq",),
        each=("data",),
    ),
    Table(
        "Round-to-nearest's mean squared error as a multiple of QET's, and the multiple of their means over the ratios",
        rows=("ratio",),
        columns=("data",),
        values=("multiple_of_qet",),
        footers=("mean_multiple", "published_mean_multiple"),
        having="multiple_of_qet",
    ),
    Table(
        "Error in % of product quantization's and of vanilla QET's in the same bytes, and as the paper has it",
        rows=("ratio", "method"),
        columns=(),
        values=(
            "mse",
            "mae",
            "mre",
            "vs_pq",
            "published_vs_pq",
            "vs_vanilla",
            "published_vs_vanilla",
            "quantize_s",
            "dequantize_s",
            "stored_ratio",
            "does_not_fit",
        ),
        each=("data",),
    ),
    Table(
        "What is left over, range in % of the matrix's, and the codebook's share of codebook and codes in %",
        rows=("ratio", "method"),
        columns=(),
        values=("range_ratio", "published_range_ratio", "codebook_share", "published_codebook_share"),
        each=("data",),
        having="published_codebook_share",
    ),
)


def check(point: dict[str, Any]) -> None:
    method(point["method"], 1.0)
    matrices.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    place, seeds = (point["data"], point["scale"], point["ratio"]), range(point["seeds"])
    try:
        rows = [fitted(point["method"], *place, seed) for seed in seeds]
    except ValueError as error:
        if "does not hold" not in str(error):
            raise
        return {"does_not_fit": str(error)}
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    times = {name: float(columns.pop(name).min()) for name in ("quantize_s", "dequantize_s")}
    for name, reference in REFERENCES:
        errors = [fitted(reference, *place, seed)["mse"] for seed in seeds]
        columns[name] = 100 * columns["mse"] / np.array(errors)
    if point["method"] == "rtn":
        columns["multiple_of_qet"] = columns["mse"] / np.array([fitted("qet", *place, s)["mse"] for s in seeds])
        columns["mean_multiple"] = np.array([_mean_multiple(*place[:2], point["mean_over"], s) for s in seeds])
    return {**mean_and_deviation(columns), **times, **_published(point)}


REFERENCES = (("vs_pq", "pq"), ("vs_vanilla", "qet_vanilla"))


@functools.cache
def fitted(name: str, data: str, scale: int, ratio: float, seed: int) -> dict[str, float]:
    """Errors of one fit; its times have compilation in them where a shape is new, as it is for the first seed."""
    x, key = matrix(data, seed, scale), jax.random.key(seed)
    start = time.perf_counter()
    tree = rqjax.fit_under_budget(name, key, x, ratio, word_bits=word_bits(data))
    quantizer, codes = jax.block_until_ready(tree)
    middle = time.perf_counter()
    rest = x - jax.block_until_ready(decode(quantizer, codes))
    stop = time.perf_counter()
    inner = codes[1] if isinstance(quantizer, rqjax.Exchange) else codes
    return {
        "mse": float(jnp.mean(rest**2)),
        "mae": float(jnp.mean(jnp.abs(rest))),
        "mre": float(jnp.mean(jnp.abs(rest) / jnp.where(x == 0, 1, jnp.abs(x)))),
        "range_ratio": 100 * float(jnp.ptp(rest) / jnp.ptp(x)),
        "codebook_share": 100 * rqjax.nbytes(quantizer) / rqjax.nbytes((quantizer, inner)),
        "quantize_s": middle - start,
        "dequantize_s": stop - middle,
        "stored_ratio": x.size * word_bits(data) / 8 / rqjax.nbytes((quantizer, codes)),
    }


def _mean_multiple(data: str, scale: int, ratios: Sequence[float], seed: int) -> float:
    """Returns round-to-nearest's mean over the ratios that hold it, as a multiple of QET's."""
    held = [ratio for ratio in ratios if ratio < word_bits(data)]
    rtn, qet = (sum(fitted(name, data, scale, ratio, seed)["mse"] for ratio in held) for name in ("rtn", "qet"))
    return rtn / qet


@jax.jit
def decode(quantizer: Any, codes: Any) -> jax.Array:
    return quantizer.decode(codes)


def _published(point: dict[str, Any]) -> dict[str, Any]:
    place, kind = (point["method"], point["ratio"]), matrices.kind(point["data"])
    found = {
        "published_vs_pq": published.QET_VS_PQ.get(kind, {}).get(place),
        "published_vs_vanilla": published.QET_VS_VANILLA.get(place) if kind == "weights" else None,
    }
    if point["method"] == "rtn":
        found["published_mean_multiple"] = published.QET_RTN.get(kind)
    if point["method"] in ("pq", "qet_vanilla") and point["ratio"] in published.QET_RANGE_AND_SHARE:
        values = published.QET_RANGE_AND_SHARE[point["ratio"]]
        found |= dict(zip(("published_range_ratio", "published_codebook_share"), values, strict=True))
    return found


def plot(rows: list[Row], folder: Path) -> list[Path]:
    """Plots errors and times by ratio; the published errors are percentages of ours of product quantization."""
    done = [row for row in rows if row["metrics"].get("mse") is not None]
    if len({row["point"]["ratio"] for row in done}) < 3:
        return []
    pq = {_cell(row): row["metrics"]["mse"] for row in done if row["point"]["method"] == "pq"}
    shown = [{**row, "metrics": {**row["metrics"], "published": _published_mse(row, pq)}} for row in done]
    style: dict[str, Any] = {"x": "ratio", "series": "method", "panel": "data", "log": True}
    note = "bars: deviation over draws; published are % of our pq"
    errors = [
        plots.curves(shown, folder / f"{y}.png", y=y, published=published, note=note, **style)
        for y, published in (("mse", "published"), ("mae", ""))
    ]
    return errors + [plots.curves(shown, folder / f"{y}.png", y=y, **style) for y in ("quantize_s", "dequantize_s")]


def _cell(row: Row) -> tuple[str, float]:
    return row["point"]["data"], row["point"]["ratio"]


def _published_mse(row: Row, pq: dict[tuple[str, float], float]) -> float | None:
    """Returns the published percentage of product quantization's error, times that error as it is here."""
    share = row["metrics"].get("published_vs_pq")
    return None if share is None or _cell(row) not in pq else share / 100 * pq[_cell(row)]
