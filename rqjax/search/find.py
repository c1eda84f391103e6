"""Searches of an index with checked arguments: of all its rows, or of those of a file part by part."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from rqjax.core import is_traced, nbytes, operation
from rqjax.search import ranking, shards
from rqjax.search.ids import FREE, free, kept
from rqjax.search.rows import Rows, moved
from rqjax.search.scan import largest

IN_MEMORY = 2**27
"""Bytes of a file's rows that are in memory at a time."""


def search_in_parts(
    index: Any, y: Array | np.ndarray, *, k: int, rerank: int | None, probes: int | None, implementation: str | None
) -> tuple[Array, Array]:
    """Searches one part of the codes after another. Of the store the rows of the best of all parts are read."""
    if any(map(is_traced, (y, index.rows.ids))):
        raise ValueError("expected queries and a filter outside jit for an index whose rows are in a file")
    if y.size == 0:
        return search_with(index, jnp.asarray(y), k=k, rerank=rerank, probes=probes)
    count, candidates, queries = len(index.rows.ids), rerank or k, y.reshape(-1, index.dim)
    rows = dataclasses.replace(index.rows, stored=None)
    size = max(1, min(count, IN_MEMORY * count // nbytes(rows)))
    options: Any = {"k": min(candidates, size), "rerank": None, "probes": probes, "implementation": implementation}

    def part(start: int) -> Rows:
        """Reads some rows; their places are their ids."""
        low = min(start, count - size)  # the last part overlaps the one before: nothing is compiled for it
        here, place = jax.tree.map(lambda a: jnp.asarray(a[low : low + size]), rows), np.arange(low, low + size)
        return dataclasses.replace(here, ids=kept(~free(here.ids) & (place >= start), place.astype(np.int32)))

    keys, places = jnp.zeros((len(queries), 0), jnp.float32), jnp.zeros((len(queries), 0), jnp.int32)
    for start in range(0, count, size):
        found = search(dataclasses.replace(index, rows=part(start)), queries, **options)
        keys, places = (jnp.concatenate(pair, axis=1) for pair in zip((keys, places), found, strict=True))
        keys, places = largest(keys, min(candidates, keys.shape[1]), places)
        jax.block_until_ready(places)  # else parts would be read while others wait to be searched
    places = np.asarray(places)
    if rerank:
        keys, ids = _by_store(index, queries, keys, places, k)
    else:
        ids = kept(places != FREE, index.rows.ids[places])
    shape = (*y.shape[:-1], k)
    return keys.reshape(shape), ids.reshape(shape + ids.shape[2:])


def _by_store(
    index: Any, y: Array | np.ndarray, keys: Float[Array, "m count"], places: np.ndarray, k: int
) -> tuple[Array, Array]:
    """Finds the best k of candidates by a store in a file. Its rows for some queries are in memory at a time."""
    rows = Rows(None, index.rows.ids, None, index.rows.stored)
    size = max(1, IN_MEMORY * len(rows.ids) // (places.shape[1] * nbytes(rows)))

    def some(start: int) -> tuple[Array, Array]:
        here = slice(start, start + size)
        own = jax.tree.map(lambda a: jnp.asarray(a[places[here].reshape(-1)]), rows)
        found = _again(dataclasses.replace(index, rows=own), y[here], keys[here], k=k)
        return jax.block_until_ready(found)

    best, ids = (jnp.concatenate(parts) for parts in zip(*map(some, range(0, len(y), size)), strict=True))
    return best, ids


@operation
def _again(index: Any, y: Shaped[Array, "m d"], keys: Float[Array, "m count"], *, k: int) -> tuple[Array, Array]:
    """Finds the best k of candidates, whose rows are those of the index, query by query."""
    place = jnp.arange(keys.size, dtype=jnp.int32).reshape(keys.shape)
    y = moved(index.metric, index.center, y)
    _, finals, ids = ranking.rescored(index.metric, index.store, index.rows, y, keys, place)
    return largest(finals, k, ids)


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
    queries = moved(index.metric, index.center, y.reshape(-1, index.dim))
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
