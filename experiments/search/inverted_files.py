"""Recall and speed of inverted files beside FAISS's, in turns with a scan of all codes, in one process."""

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import rqjax
from experiments.harness import plot as plots
from experiments.harness.table import Table
from experiments.harness.timing import turns
from experiments.search import search
from experiments.search.peers import library
from rqjax import metrics
from rqjax.core import unknown_name

QUERIES = 1000
"""Queries that recall is measured on."""
ALONE = 20
"""Calls with one query each, one after another."""
SCANNED = "eden_unbiased_4"
"""The codes of the scan that takes turns with each codec."""
MADE_BY = ("experiments/search/search.py", "experiments/search/peers.py", "rqjax/search/*.py")
TABLES = (
    Table(
        f"Recall of the ten nearest, queries a second, and how many times as many as a scan of all codes of {SCANNED}"
        " answers; bytes of all that an index holds, by vector",
        rows=("codec", "probes"),
        columns=(),
        values=("bytes", "build_seconds", "10@10", "queries_per_second", "vs_scan"),
        each=("n", "batch"),
    ),
)


class Inverted(NamedTuple):
    """An index: bytes of all its arrays, seconds that it took to build, and the ids that a search finds."""

    nbytes: int
    seconds: float
    search: Callable[[np.ndarray, int], np.ndarray]
    """Function from queries and probes to ids (queries, 10)."""


def check(point: dict[str, Any]) -> None:
    name, _ = _parts(point["codec"])
    if name in PEERS:
        library("faiss")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one codec at so many probes."""
    size, probes = (point["n"], point["dim"]), point["probes"]
    x, many, true = vectors(*size)
    index, scan = built(point["codec"], *size, point["lists"]), scanned(*size)
    searches = {"mine": lambda y: index.search(y, probes), "scan": lambda y: np.asarray(scan.search(y, 10)[1])}
    batches = many.reshape(-1, point["batch"], size[1])  # others in each round, as lists differ in length
    functions = {name: _each(search, batches) for name, search in searches.items()}
    times = turns(functions, point["rounds"] + 1, calls=max(1, ALONE // point["batch"]))
    seconds = {name: float(np.median(taken[1:])) for name, taken in times.items()}
    return {
        "bytes": index.nbytes / len(x),
        "build_seconds": index.seconds,
        "10@10": metrics.recall(index.search(many, probes), true),
        "queries_per_second": point["batch"] / seconds["mine"],
        "vs_scan": seconds["scan"] / seconds["mine"],
    }


def _each(search: Callable[[np.ndarray], np.ndarray], batches: np.ndarray) -> Callable[[], np.ndarray]:
    """Returns a function that searches for the queries of one batch after the other."""
    turn = itertools.cycle(batches)
    return lambda: search(next(turn))


def _parts(codec: str) -> tuple[str, int]:
    """A codec's name and bits."""
    name, _, bits = codec.rpartition("_")
    names = [*PEERS, *rqjax.METHODS, *rqjax.FITTED]
    if name not in names or not bits.isdecimal():
        raise unknown_name("codec", codec, [f"{name}_4" for name in names])
    return name, int(bits)


@functools.lru_cache(maxsize=1)
def vectors(n: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors of clusters, queries, and the rows of the ten nearest to each."""
    ((x, queries),) = search.sets("clustered", 1, n, QUERIES, dim)
    return x, queries, search.neighbours(x, queries, 10)


@functools.lru_cache(maxsize=1)
def scanned(n: int, dim: int) -> rqjax.Index:
    x = vectors(n, dim)[0]
    name, bits = _parts(SCANNED)
    return rqjax.Index.build(search.quantizer(name, x, bits, 0), x)


@functools.lru_cache(maxsize=2)
def built(codec: str, n: int, dim: int, lists: int) -> Inverted:
    x = vectors(n, dim)[0]
    name, bits = _parts(codec)
    start = time.perf_counter()
    if name in PEERS:
        index, find = PEERS[name](x, bits, lists)
        index.train(x)
        index.add(x)
        seconds = time.perf_counter() - start
        return Inverted(library("faiss").serialize_index(index).nbytes, seconds, find)
    code = search.quantizer(name, x, bits, 0)
    ivf = jax.block_until_ready(rqjax.Index.build(code, x, lists=lists, key=jax.random.key(0)))
    seconds = time.perf_counter() - start
    return Inverted(ivf.nbytes, seconds, lambda y, probes: np.asarray(ivf.search(y, 10, probes=probes)[1]))


def faiss_ivfpq_fastscan(x: np.ndarray, bits: int, lists: int) -> Any:
    """Groups of 4 / bits coordinates of residuals with 16 centroids each, scored in registers."""
    faiss, d = library("faiss"), x.shape[1]
    index = faiss.IndexIVFPQFastScan(faiss.IndexFlatIP(d), d, lists, d * bits // 4, 4, faiss.METRIC_INNER_PRODUCT)
    index.by_residual = True  # a little slower, and finds more than FAISS's default
    return _probed(index, index)


def faiss_ivf_rabitq(x: np.ndarray, bits: int, lists: int) -> Any:
    """Multi-bit RaBitQ of randomly rotated residuals."""
    faiss, d = library("faiss"), x.shape[1]
    inner = faiss.IndexIVFRaBitQ(faiss.IndexFlatIP(d), d, lists, faiss.METRIC_INNER_PRODUCT, True, bits)
    rotation = faiss.RandomRotationMatrix(d, d)
    rotation.init(0)
    return _probed(faiss.IndexPreTransform(rotation, inner), inner)


def faiss_hnsw_sq(x: np.ndarray, bits: int, lists: int) -> Any:
    """A graph of 16 neighbors a vector over uniform levels; 16 times as many vectors as `probes` are looked at."""
    faiss, d = library("faiss"), x.shape[1]
    kind = getattr(faiss.ScalarQuantizer, f"QT_{bits}bit")
    index = faiss.IndexHNSWSQ(d, kind, 16, faiss.METRIC_INNER_PRODUCT)

    def find(y: np.ndarray, probes: int) -> np.ndarray:
        index.hnsw.efSearch = 16 * probes
        return index.search(y, 10)[1]

    return index, find


PEERS: dict[str, Callable[[np.ndarray, int, int], Any]] = {
    "faiss_ivfpq_fastscan": faiss_ivfpq_fastscan,
    "faiss_ivf_rabitq": faiss_ivf_rabitq,
    "faiss_hnsw_sq": faiss_hnsw_sq,
}
"""Functions from (x, bits, lists) to an index that is not trained, and the search in it."""


def _probed(index: Any, inner: Any) -> Any:
    def find(y: np.ndarray, probes: int) -> np.ndarray:
        inner.nprobe = probes
        return index.search(y, 10)[1]

    return index, find


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots queries a second by recall: a line for each codec from few probes to many."""

    shown = [{**row, "metrics": {**row["metrics"], "queries": f"{row['point']['batch']:,} together"}} for row in rows]
    path = folder / "by_recall.png"
    return [plots.curves(shown, path, x="10@10", y="queries_per_second", series="codec", panel="queries", log=True)]
