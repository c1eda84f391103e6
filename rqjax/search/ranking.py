"""Checks of the queries of an index, and the ranking of what it finds."""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from rqjax.arrays import blocks
from rqjax.arrays.planes import pick
from rqjax.core import Quantizer, as_array, check_floats, check_int, is_traced, operation, platforms
from rqjax.search.centers import check_single
from rqjax.search.ids import kept
from rqjax.search.probe import probe
from rqjax.search.rows import SMALL, Rows
from rqjax.search.scan import scan

Candidates: TypeAlias = tuple[Float[Array, "m count"], Float[Array, "m count"], Int32[Array, "m count *halves"]]
"""Keys by which they were chosen, keys by which they are ordered, ids."""
GPU_BYTES = 2**28
"""Bytes of found vectors in float32 that a GPU decodes at once; a CPU decodes those of one query."""


def check_parts(quantizer: Any, store: Quantizer | None, metric: str, dim: int) -> None:
    """Raises a TypeError or ValueError for parts that no index of vectors of dimension `dim` can have."""
    if metric not in ("ip", "l2", "cosine"):
        raise ValueError(f"expected metric 'ip', 'l2' or 'cosine', got {metric!r}")
    if store is not None and store.dim != dim:
        raise ValueError(f"expected a store of dimension {dim}, got {store.dim}")
    if not isinstance(quantizer, Quantizer) and not callable(quantizer):
        raise TypeError(f"expected a quantizer or a function that fits one, got {quantizer!r}")
    for part in (quantizer, store):
        if isinstance(part, Quantizer):
            check_single(part)


def check_queries(index: Any, queries: Any, k: Any, rerank: Any) -> Array | np.ndarray:
    """Returns the queries, if the index can be searched for k of them."""
    y = check_numbers(index, queries)
    rows = len(index.rows.ids) if is_traced(index.rows.ids) else len(index)
    if rows == 0:
        raise ValueError("the index is empty")
    k = check_int("k", k, 1, rows)
    if rerank is not None:
        check_int("rerank", rerank, k, rows)
        if index.store is None:
            raise ValueError("expected an index with a store to rerank with; pass store= to Index.build")
    return y


def check_numbers(index: Any, queries: Any) -> Array | np.ndarray:
    """Returns queries (*m, d), if they are finite as far as that is known. Those of an index on a mesh may be on any
    device."""
    y = as_array(queries)
    y = y.astype(np.float32) if y.dtype in SMALL else y
    check_floats(y, index.dim)
    if is_traced(y):
        return y
    known = np.asarray(y)
    finite = np.isfinite(known)
    if not finite.all():
        raise ValueError(f"expected finite queries, got {(~finite).sum()} NaN or Inf")
    return known if index.sharding else y


def scores(metric: str, keys: Float[Array, "*m k"]) -> Float[Array, "*m k"]:
    """Scores that a search returns for keys. Codes may give near vectors a squared distance below 0, which becomes
    0."""
    return jnp.maximum(-2 * keys, 0) if metric == "l2" else keys


@operation
def rescored(
    metric: str,
    store: Quantizer | None,
    rows: Rows,
    y: Float[Array, "m d"],
    keys: Float[Array, "m count"],
    found: Int32[Array, "m count"],
) -> Candidates:
    """Scores found rows again. Returns their keys, those by the store (the same ones if there is none), and ids. For
    the metric "l2" keys are less half of the queries' energy: minus half of squared distances."""
    ids = kept(keys > -jnp.inf, rows.ids[found])
    if metric == "l2":
        keys = keys - jnp.sum(y**2, axis=1, keepdims=True) / 2
    if store is None:
        return keys, keys, ids

    def again(query: tuple[Array, Array]) -> Float[Array, "count"]:
        x = store.decode(jax.tree.map(lambda a: pick(a, query[1]), rows.stored))
        return -jnp.sum((query[0] - x) ** 2, axis=1) / 2 if metric == "l2" else blocks.inner(query[0], x)

    together = max(1, GPU_BYTES // (4 * found.shape[1] * store.dim)) if platforms.on_gpu() else None
    finals = lax.map(again, (y, found), batch_size=together)
    return keys, jnp.where(keys > -jnp.inf, finals, -jnp.inf), ids


def candidates(
    probes: int | None,
    metric: str,
    count: int,
    quantizers: tuple[Quantizer | None, Any],
    rows_and_starts: tuple[Rows, Int32[Array, "bounds"] | None],
    y: Float[Array, "m d"],
) -> Candidates:
    """Finds and scores candidates of queries among the rows of a shard; quantizers are a store and that of codes."""
    (store, quantizer), (rows, starts) = quantizers, rows_and_starts
    if starts is None or probes is None:
        keys, found = scan(quantizer, rows.codes, rows.bias, y, min(count, len(rows.ids)))
    else:
        rows = rows if store else dataclasses.replace(rows, stored=None)
        keys, found = probe(quantizer, rows, starts, y, count, probes, metric)
    return rescored(metric, store, rows, y, keys, found)
