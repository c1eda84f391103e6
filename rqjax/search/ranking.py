"""What every index does: checks, and the order of what it finds."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int32, PyTree, Shaped

from rqjax.arrays import blocks, norms
from rqjax.arrays.planes import as_float32, pick
from rqjax.core import Quantizer, as_array, check_floats, check_int, is_traced, nbytes, treefile
from rqjax.search import shards
from rqjax.search.rows import FREE, Rows, without
from rqjax.search.scan import largest

T = TypeVar("T", bound="Searched")
Candidates: TypeAlias = tuple[Float[Array, "m count"], Float[Array, "m count"], Int32[Array, "m count"]]
"""Keys by which they were chosen, keys by which they are ordered, ids."""


def check_parts(quantizer: Quantizer, store: Quantizer | None, metric: str) -> None:
    if metric not in ("ip", "l2", "cosine"):
        raise ValueError(f"expected metric 'ip', 'l2' or 'cosine', got {metric!r}")
    if store is not None and store.dim != quantizer.dim:
        raise ValueError(f"expected a store of dimension {quantizer.dim}, got {store.dim}")
    if tile := next((part.tile for part in (quantizer, store) if part is not None and part.tile > 1), None):
        raise ValueError(f"expected codes of one vector each, got those of {tile} vectors together")


class Searched:
    """What every index has: these fields, and what does not depend on how its rows lie."""

    quantizer: Quantizer
    rows: Rows
    store: Quantizer | None
    metric: str
    center: Float[Array, "d"] | None
    sharding: NamedSharding | None

    @property
    def dim(self) -> int:
        return self.quantizer.dim

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: the quantizers' own, centroids, codes, ids, and rows that are free."""
        return nbytes(self)

    def __len__(self) -> int:
        return self.rows.held

    def remove(self: T, ids: Any) -> T:
        """Without some vectors, whose rows are free from then on.

        Raises:
          TypeError, ValueError: ids are no different whole numbers, one is not in the index, or the index is sharded.
        """
        self._check_whole("remove from")
        return dataclasses.replace(self, rows=without(self.rows, ids))  # pyright: ignore[reportArgumentType]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index to a safetensors file; one that was there is replaced at once or stays as it was.

        Raises:
          ValueError: the index is sharded.
        """
        self._check_whole("save")
        treefile.save(self, path)

    @classmethod
    def load(cls: type[T], path: str | os.PathLike[str]) -> T:
        """What `save` wrote. Raises as `storage.load` does, and a ValueError if it is something else."""
        return cls._of_file(path)

    @classmethod
    def _of_file(cls: type[T], path: str | os.PathLike[str], mapped: bool = False) -> T:
        index, _ = treefile.load(path, mapped=mapped)
        if not isinstance(index, cls):
            raise ValueError(f"expected an {cls.__name__} in {path}, found a {type(index).__name__}")
        return index

    def _check_whole(self, what: str) -> None:
        if self.sharding is not None:
            raise ValueError(f"cannot {what} a sharded index; do so with the index that it was made from")

    def _checked(self, queries: Any, k: int, rerank: int | None) -> Array | np.ndarray:
        """The queries, if the index can be searched for k of them."""
        y = as_array(queries)
        check_floats(y, self.dim)
        rows = len(self.rows.ids) if is_traced(self.rows.ids) else len(self)
        if rows == 0:
            raise ValueError("the index is empty")
        k = check_int("k", k, 1, rows)
        if rerank is not None:
            check_int("rerank", rerank, k, rows)
            if self.store is None:
                name = type(self).__name__
                raise ValueError(f"expected an index with a store to rerank with; pass store= to {name}.build")
        if is_traced(y):
            return y
        finite = np.isfinite(np.asarray(y))
        if not finite.all():
            raise ValueError(f"expected finite queries, got {(~finite).sum()} NaN or Inf")
        return np.asarray(y) if self.sharding else y


def ranked(
    find: Callable[..., Any],
    index: Searched,
    quantizers: tuple[Quantizer, ...],
    rows: PyTree,
    y: Shaped[Array, "*m d"],
    *,
    k: int,
    rerank: int | None,
) -> tuple[Array, Array]:
    """The best k of `find(metric, count, (store, *quantizers), rows, queries)`, their keys and ids; of a sharded index
    `find` is of each shard. `store` is None if nothing is scored again."""
    candidates = rerank or k
    if y.size == 0:
        return jnp.zeros((*y.shape[:-1], k)), jnp.full((*y.shape[:-1], k), FREE, jnp.int32)
    queries = as_float32(y).reshape(-1, index.dim)
    queries = norms.direction(queries) if index.metric == "cosine" else queries
    queries = queries if index.center is None else queries - index.center
    find = functools.partial(find, index.metric, candidates)
    arguments = (index.store if rerank else None, *quantizers), rows, queries
    if index.sharding is None:
        _, finals, ids = find(*arguments)
    else:
        keys, finals, ids = shards.gathered(find, index.sharding, *arguments)
        _, finals, ids = largest(keys, candidates, finals, ids)
    keys, ids = largest(finals, k, ids)
    return keys.reshape(*y.shape[:-1], k), ids.reshape(*y.shape[:-1], k)


def scores(metric: str, keys: Float[Array, "*m k"]) -> Float[Array, "*m k"]:
    """What a search returns for keys. Codes may say of near vectors that their squared distance is below 0."""
    return jnp.maximum(-2 * keys, 0) if metric == "l2" else keys


def rescored(
    metric: str,
    store: Quantizer | None,
    rows: Rows,
    y: Float[Array, "m d"],
    keys: Float[Array, "m count"],
    found: Int32[Array, "m count"],
) -> Candidates:
    """The rows that were found: their keys, those by the store (the same ones if there is none), ids. For the metric
    "l2" keys are less half of the queries' energy: minus half of squared distances."""
    ids = jnp.where(keys > -jnp.inf, rows.ids[found], FREE)
    if metric == "l2":
        keys = keys - jnp.sum(y**2, axis=1, keepdims=True) / 2
    if store is None:
        return keys, keys, ids

    def again(query: tuple[Array, Array]) -> Float[Array, "count"]:
        x = store.decode(jax.tree.map(lambda a: pick(a, query[1]), rows.stored))
        return -jnp.sum((query[0] - x) ** 2, axis=1) / 2 if metric == "l2" else blocks.inner(query[0], x)

    finals = lax.map(again, (y, found))
    return keys, jnp.where(ids == FREE, -jnp.inf, finals), ids
