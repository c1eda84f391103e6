"""Seconds to quantize a matrix under a budget and to get it back, and FAISS's for product quantization."""

import os
import resource
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else FAISS's idle threads spin into the next measurement

import faiss
import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.harness.table import Table
from experiments.harness.timing import turns
from experiments.matrices.matrix_budget import decode
from rqjax.recipes.budget import method
from rqjax.recipes.opq import fit_opq

WIDTH, CENTROIDS = 8, 256
"""Width of groups and number of centroids of OPQ here; FAISS takes powers of two only."""

MADE_BY = ("rqjax/recipes/budget.py", "rqjax/arrays/kmeans.py", "rqjax/quantizers/product.py")
TABLES = (
    Table(
        "Seconds, and how many times as long FAISS takes to fit the same kind of quantizer with as many centroids; mean"
        " squared error in % of FAISS's; the most memory the process has had so far",
        rows=("rows", "columns", "method"),
        columns=(),
        values=("quantize_s", "dequantize_s", "vs_faiss", "mse_vs_faiss", "peak_gib"),
        footers=("ratio",),
    ),
)


def check(point: dict[str, Any]) -> None:
    method(point["method"], 1.0)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """A method and FAISS take turns; the least time of the rounds, after one for compilation."""
    name, (n, d) = point["method"], point["shape"]
    x = _correlated(n, d)

    def fit() -> Any:
        return _opq(x) if name == "opq" else rqjax.fit_under_budget(name, jax.random.key(0), x, point["ratio"])

    quantizer, codes = fit()
    functions: dict[str, Callable[[], Any]] = {"quantize_s": fit, "dequantize_s": lambda: decode(quantizer, codes)}
    result: dict[str, Any] = {"rows": n, "columns": d}
    if name in ("pq", "opq"):
        theirs = _faiss(name, np.asarray(x), CENTROIDS if name == "opq" else quantizer.codebooks.shape[1])
        functions["faiss"] = theirs
        result["mse_vs_faiss"] = 100 * float(jnp.mean((x - decode(quantizer, codes)) ** 2)) / theirs()
    best = {label: float(seconds.min()) for label, seconds in turns(functions, point["rounds"]).items()}
    result["vs_faiss"] = best["faiss"] / best["quantize_s"] if "faiss" in best else None
    return {**result, **best, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def _correlated(n: int, d: int) -> jax.Array:
    """Gaussian rows whose neighboring coordinates are correlated, as 0.7 to the power of their distance."""
    noise = jax.random.normal(jax.random.key(1), (n, d))
    weights = 0.7 ** jnp.arange(24.0)
    return jax.vmap(lambda row: jnp.convolve(row, weights)[:d])(noise)


@jax.jit
def _opq(x: jax.Array) -> Any:
    quantizer = fit_opq(jax.random.key(0), x, WIDTH, CENTROIDS)
    return quantizer, quantizer.encode(x)


def _faiss(name: str, x: np.ndarray, k: int) -> Callable[[], float]:
    """Fits with FAISS and returns the mean squared error."""
    if name == "opq":
        return lambda: _faiss_opq(x)
    groups = [np.ascontiguousarray(group) for group in np.split(x, x.shape[1] // WIDTH, axis=1)]

    def fit() -> float:
        """Trains k-means for each group, as FAISS's product quantizer does, which takes powers of two only."""
        errors = []
        for group in groups:
            clusters = faiss.Kmeans(WIDTH, k, niter=20, min_points_per_centroid=1, max_points_per_centroid=10**9)
            clusters.train(group)
            errors.append(clusters.index.search(group, 1)[0].mean() / WIDTH)
        return float(np.mean(errors))

    return fit


def _faiss_opq(x: np.ndarray) -> float:
    n, d = x.shape
    quantizer: Any = faiss.ProductQuantizer(d, d // WIDTH, CENTROIDS.bit_length() - 1)
    quantizer.cp.min_points_per_centroid, quantizer.cp.max_points_per_centroid = 1, 10**9
    rotation: Any = faiss.OPQMatrix(d, d // WIDTH)
    rotation.pq, rotation.max_train_points = quantizer, n
    rotation.train(x)
    rotation.pq = None
    y = rotation.apply(x)
    quantizer.train(y)
    return float(((y - quantizer.decode(quantizer.compute_codes(y))) ** 2).mean())
