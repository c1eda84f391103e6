"""Searches of an index with checked arguments: of all its rows, or of those of a file part by part."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from rqjax.arrays import norms
from rqjax.arrays.planes import as_float32
from rqjax.core import operation
from rqjax.search import ranking, shards
from rqjax.search.ids import FREE
from rqjax.search.scan import largest

IN_MEMORY = 2**20
"""Rows of a mapped file that are in memory at a time."""


def search_in_parts(
    index: Any, y: Array | np.ndarray, *, k: int, rerank: int | None, **options: Any
) -> tuple[Array, Array]:
    """Searches one part of the rows after another."""
    count = len(index.rows.ids)
    size = min(count, max(IN_MEMORY, rerank or k))
    parts = []
    for start in range(0, count, size):
        low = min(start, count - size)  # the last part overlaps the one before: nothing is compiled for it
        rows = jax.tree.map(lambda a, low=low: jnp.asarray(a[low : low + size]), index.rows)
        rows = dataclasses.replace(rows, ids=rows.ids.at[: start - low].set(FREE))
        parts.append(search(dataclasses.replace(index, rows=rows), y, k=k, rerank=rerank, **options))
    keys, ids = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=y.ndim - 1), *parts)
    return largest(keys, k, ids)


@operation
def search(
    index: Any, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None, probes: int | None
) -> tuple[Array, Array]:
    """`search_with` as an operation, which backends may have kernels for."""
    return search_with(index, y, k=k, rerank=rerank, probes=probes)


def search_with(
    index: Any, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None, probes: int | None
) -> tuple[Array, Array]:
    """`Index.search` with checked arguments. It returns keys, from which `ranking.scores` makes scores, and ids."""
    shape = (*y.shape[:-1], k)
    if y.size == 0:
        return jnp.zeros(shape), jnp.full(shape + index.rows.ids.shape[1:], FREE, jnp.int32)
    queries = as_float32(y).reshape(-1, index.dim)
    queries = norms.direction(queries) if index.metric == "cosine" else queries
    queries = queries if index.center is None else queries - index.center
    candidates = rerank or k
    find = functools.partial(ranking.candidates, probes, index.metric, candidates)
    arguments = (index.store if rerank else None, index.quantizer), (index.rows, index.starts), queries
    if index.sharding is None:
        _, finals, ids = find(*arguments)
    else:
        keys, finals, ids = shards.gathered(find, index.sharding, *arguments)
        _, finals, ids = largest(keys, candidates, finals, ids)
    keys, ids = largest(finals, k, ids)
    return keys.reshape(shape), ids.reshape(shape + ids.shape[2:])
