"""Seconds to train and fill an index (TurboQuant, section 4.4, Table 2)."""

import resource
import time
from typing import Any

from experiments.harness.published import INDEXING
from experiments.harness.table import Table
from experiments.search import search

MADE_BY = (
    "experiments/search/search.py",
    "experiments/search/peers.py",
    "rqjax/recipes/methods.py",
    "rqjax/search/index.py",
)
TABLES = (
    Table(
        "Seconds to index vectors, training included: of the first index, with compilation, and of another one like it",
        rows=("codec", "bits"),
        columns=("dim",),
        values=("first", "seconds", "published"),
    ),
    Table(
        "Memory of building an index and of a search for 100 queries, the vectors' own included, the most so far: GiB",
        rows=("codec", "bits"),
        columns=("dim",),
        values=("peak_gib",),
        having="peak_gib",
    ),
)


def check(point: dict[str, Any]) -> None:
    search.check(point["codec"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one codec; an index that takes long is built only once."""
    x = search.unit(point["n"], point["dim"], 0)
    seconds: list[float] = []
    while not seconds or (len(seconds) < 2 and sum(seconds) < point["enough"]):
        start = time.perf_counter()
        codec = search.build(point["codec"], x, point["bits"], len(seconds))
        seconds.append(time.perf_counter() - start)
        codec.search(x[:100], 10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    published = INDEXING.get(point["codec"], {}).get(point["dim"])
    return {
        "first": seconds[0],
        "seconds": seconds[-1],
        "published": published,
        "peak_gib": peak if point.get("memory") else None,
    }
