"""Queries a second through codes, and recall, beside FAISS's scans of its own codes, in turns in one process."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import plot as plots
from experiments.harness.table import Table
from experiments.harness.timing import turns
from experiments.search import search
from experiments.search.peers import Peer
from rqjax import metrics

MANY = 1000
"""Queries that recall is measured on."""
ALONE = 20
"""Calls with one query each, one after another."""
YARDSTICKS = ("rabitq", "pq", "fastscan")
"""FAISS's RaBitQ by FastScan, IndexPQ and IndexPQFastScan, which take turns with each codec."""
MADE_BY = ("experiments/search/search.py", "experiments/search/peers.py", "rqjax/search/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "Queries a second for the ten nearest, and how many times as many as FAISS answers",
        rows=("codec",),
        columns=(),
        values=("bytes", "10@10", "queries_per_second", *(f"vs_{name}" for name in YARDSTICKS)),
        each=("dim", "bits", "batch"),
    ),
)


def check(point: dict[str, Any]) -> None:
    search.check(point["codec"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one codec against its yardsticks."""
    n, dim, bits, batch = point["n"], point["dim"], point["bits"], point["batch"]
    queries, many = search.unit(batch, dim, 1), search.unit(MANY, dim, 1)
    codecs = {"mine": built(point["codec"], n, dim, bits)}
    codecs |= {name: built(f"faiss_{name}", n, dim, bits) for name in YARDSTICKS}
    functions = {name: functools.partial(codec.search, queries, 10) for name, codec in codecs.items()}
    times = turns(functions, point["rounds"] + 1, calls=max(1, ALONE // batch))
    seconds = {name: float(np.median(taken[1:])) for name, taken in times.items()}
    ratios = {f"vs_{name}": seconds[name] / seconds["mine"] for name in YARDSTICKS}
    found = metrics.recall(codecs["mine"].search(many, 10)[1], nearest(n, dim))
    size = codecs["mine"].bytes_per_vector
    return {"bytes": size, "10@10": found, "queries_per_second": batch / seconds["mine"], **ratios}


@functools.lru_cache(maxsize=8)
def built(codec: str, n: int, dim: int, bits: int) -> Peer:
    return search.build(codec, search.unit(n, dim, 0), bits, 0)


@functools.cache
def nearest(n: int, dim: int) -> np.ndarray:
    return search.neighbours(search.unit(n, dim, 0), search.unit(MANY, dim, 1), 10)


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots queries a second by recall: a line for each codec from few bits to many."""
    shown = [{**row, "metrics": {**row["metrics"], "queries": f"{row['point']['batch']} together"}} for row in rows]
    style: dict[str, Any] = {
        "series": "codec",
        "panel": "queries",
        "log": True,
        "mark": "bits",
        "note": "numerals: bits a number",
    }
    return [plots.curves(shown, folder / "by_recall.png", x="10@10", y="queries_per_second", **style)]
