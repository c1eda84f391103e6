"""Recall of nearest neighbors at the bytes of a vector: this library's codes, FAISS's and turbovec's."""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.data import samples
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.harness.texts import numbers
from experiments.search import search
from rqjax import metrics

KS = (1, 2, 4, 8, 16, 32, 64)

MADE_BY = (
    "experiments/search/search.py",
    "experiments/search/peers.py",
    "rqjax/recipes/methods.py",
    "rqjax/recipes/klt.py",
    "rqjax/search/index.py",
)
TABLES = (
    Table(
        "Recall of the nearest neighbour among the first k found (1@k), and of the ten nearest among the first ten"
        " (10@10); bytes of a vector but its id",
        rows=("codec", "bits"),
        columns=(),
        values=("bytes", "shared_bytes", "1@1", "1@4", "1@16", "1@64", "10@10"),
        each=("vectors",),
    ),
)


def check(point: dict[str, Any]) -> None:
    search.check(point["codec"])
    samples.check(_set(point["vectors"])[0])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one codec on one data set; each seed draws vectors, queries, rotation and centroids."""
    (name, dim), found, sizes = _set(point["vectors"]), [], {}
    for seed, (x, queries) in enumerate(search.sets(name, point["seeds"], point["n"], point["queries"], dim)):
        true = search.neighbours(x, queries, 10)
        codec = search.build(point["codec"], x, point["bits"], seed)
        sizes = {"bytes": codec.bytes_per_vector, "shared_bytes": codec.shared_bytes}
        ids = codec.search(queries, max(KS))[1]
        nearest = {f"1@{k}": metrics.recall(ids[:, :k], true[:, :1]) for k in KS}
        found.append({**nearest, "10@10": metrics.recall(ids[:, :10], true)})
    recalls = mean_and_deviation({name: np.array([one[name] for one in found]) for name in found[0]})
    return {**sizes, **recalls}


def _set(vectors: str) -> tuple[str, int]:
    name, _, dim = vectors.partition(", ")
    return name, numbers(dim, "d = 200", f"the dimension of vectors {vectors!r}")[0]


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots recall by bytes in at most a few hundred dimensions, without what differs little from another codec."""
    alike = ("turbovec_calibrated", "faiss_eden", "faiss_tqmse", "faiss_tq", "turboquant_trellis:unit", "klt_trellis")
    short = [row for row in rows if _set(row["point"]["vectors"])[1] < 500] or rows
    shown = [row for row in short if row["point"]["codec"] not in alike] or short
    style: dict[str, Any] = {"x": "bytes", "series": "codec", "panel": "vectors", "note": "bars: deviation over draws"}
    return [
        plots.curves(shown, folder / f"{file}.png", y=name, **style)
        for file, name in (("nearest", "1@1"), ("ten", "10@10"))
    ]
