"""Queries a second through codes, beside FAISS scanning its own: in turns, in one process."""

import functools
from typing import Any

import numpy as np

from experiments import search
from experiments.peers import Peer
from experiments.table import Table
from experiments.timing import turns

TABLES = (
    Table(
        "Queries a second for the ten nearest, and how many times as many as FAISS's IndexRaBitQ and IndexPQ answer",
        rows=("codec",),
        columns=(),
        values=("bytes", "queries_per_second", "vs_rabitq", "vs_pq"),
        each=("dim", "bits", "batch"),
    ),
)


def check(point: dict[str, Any]) -> None:
    search.check(point["codec"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One codec against its two yardsticks."""
    n, dim, bits, batch = point["n"], point["dim"], point["bits"], point["batch"]
    x = search.unit(n, dim, 0)
    queries = search.unit(batch, dim, 1)
    codecs = {"mine": search.build(point["codec"], x, bits, 0)}
    codecs |= {name: yardstick(f"faiss_{name}", n, dim, bits) for name in ("rabitq", "pq")}
    times = turns(
        {name: functools.partial(codec.search, queries, 10) for name, codec in codecs.items()}, point["rounds"] + 1
    )
    seconds = {name: float(np.median(taken[1:])) for name, taken in times.items()}
    ratios = {f"vs_{name}": seconds[name] / seconds["mine"] for name in ("rabitq", "pq")}
    return {"bytes": codecs["mine"].bytes_per_vector, "queries_per_second": batch / seconds["mine"], **ratios}


@functools.lru_cache(maxsize=4)
def yardstick(name: str, n: int, dim: int, bits: int) -> Peer:
    return search.build(name, search.unit(n, dim, 0), bits, 0)
