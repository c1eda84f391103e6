"""Nearest neighbours over codes: an index holds the codes of vectors in rows, and a search scans them.

Every quantizer serves. An index takes as long to build as its vectors to encode (TurboQuant, section 4.4), and a search
takes memory for the codes and one block of scores: the vectors are never decoded.
"""

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32, Shaped

from rqjax import ops, shards, storage
from rqjax.lanes import as_float32
from rqjax.pytree import pytree, static
from rqjax.quantizer import Codes, Quantizer, Queries, Vectors, check_int, check_vectors, is_traced, nbytes
from rqjax.scan import largest, scan

FREE = -1
"""The id of a row that holds no vector."""
ENCODED = 2**24
"""Coordinates that are encoded in one call: 64 MiB in float32."""


@pytree
class Rows:
    """What an index stores of each vector: arrays (rows, ...)."""

    codes: Codes
    ids: Int32[Array, "rows"]
    """`FREE` where there is no vector."""
    energies: Float[Array, "rows"] | None
    """For the metric "l2", <x, x~> of a vector x and what its codes stand for, x~."""
    stored: Codes | None
    """Codes of the store."""


@pytree
class Index:
    """An index as `Index.build` makes it. `add` and `remove` return another one.

    It is a pytree: searches may be parts of jit-compiled functions.
    """

    quantizer: Quantizer
    rows: Rows
    store: Quantizer | None
    metric: str = static()
    sharding: NamedSharding | None = static(default=None)
    """Of the rows, if they are on a mesh."""

    @property
    def dim(self) -> int:
        return self.quantizer.dim

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: the quantizers' own, codes, ids, and rows that are free."""
        return nbytes(self)

    def __len__(self) -> int:
        return int(jnp.sum(self.rows.ids != FREE))

    @classmethod
    def build(
        cls,
        quantizer: Quantizer,
        x: Vectors,
        *,
        ids: Any = None,
        metric: str = "ip",
        store: Quantizer | None = None,
    ) -> "Index":
        """An index of vectors.

        Args:
          quantizer: any. `Centered` subtracts a mean first; `Scaled` of mode "unbiased" makes inner products unbiased.
          x: vectors (n, d), n may be 0. Of a memory-mapped file a part is read at a time.
          ids: n different whole numbers from 0 to 2^31 - 1; if not given, 0 to n - 1.
          metric: "ip" finds the largest inner products, "cosine" those of directions, "l2" the least squared distances
            |q|^2 - 2 <q, x~> + <x, x~>, for which 4 bytes more a vector are stored. By whatever factor a quantizer
            shrinks inner products, both of these terms shrink alike, and the order stays.
          store: keeps codes of its own, which the best candidates can be scored again with: `Exact(dim, "float16")`, or
            `rtn` at 8 bits.

        Raises:
          TypeError: x does not hold floating-point numbers, or ids are not whole.
          ValueError: shapes do not agree, x is not finite, ids are not different or out of range, or there is no such
            metric.
        """
        if metric not in ("ip", "l2", "cosine"):
            raise ValueError(f"expected metric 'ip', 'l2' or 'cosine', got {metric!r}")
        if store is not None and store.dim != quantizer.dim:
            raise ValueError(f"expected a store of dimension {quantizer.dim}, got {store.dim}")
        return cls(quantizer, _encode(quantizer, store, metric, x, ids, first=0), store, metric)

    def add(self, x: Vectors, *, ids: Any = None) -> "Index":
        """With more vectors. They take free rows; where there are too few, rows grow by an eighth at least.

        Args:
          x: vectors (n, d).
          ids: as in `build`, none of them in the index; if not given, those that follow the largest there.

        Raises:
          TypeError, ValueError: as in `build`; or an id is in the index, or the index is sharded.
        """
        self._check_whole("add to")
        old = np.asarray(self.rows.ids)
        new = _encode(self.quantizer, self.store, self.metric, x, ids, first=int(old.max(initial=-1)) + 1)
        known = np.isin(new.ids, old)
        if known.any():
            first = np.asarray(new.ids)[known][0]
            raise ValueError(f"{known.sum()} ids are in the index already, the first is {first}")
        free = np.flatnonzero(old == FREE)
        missing = len(known) - len(free)
        rows = _grow(self.rows, max(missing, len(old) // 8)) if missing > 0 else self.rows
        places = np.concatenate([free, np.arange(len(old), len(rows.ids))])[: len(known)]
        return dataclasses.replace(self, rows=_put(rows, new, places))

    def remove(self, ids: Any) -> "Index":
        """Without some vectors, whose rows are free from then on.

        Raises:
          TypeError, ValueError: ids are no different whole numbers, one is not in the index, or the index is sharded.
        """
        self._check_whole("remove from")
        old, ids = np.asarray(self.rows.ids), _check_ids(ids, np.size(ids))
        unknown = ~np.isin(ids, old)
        if unknown.any():
            raise ValueError(f"{unknown.sum()} ids are not in the index, the first is {ids[unknown][0]}")
        left = jnp.where(np.isin(old, ids), FREE, self.rows.ids)
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, ids=left))

    def search(
        self, queries: Queries, k: int, *, rerank: int | None = None
    ) -> tuple[Float[Array, "*m k"], Int32[Array, "*m k"]]:
        """The k vectors nearest to each query, the nearest first.

        Args:
          queries: (*m, d).
          k: how many.
          rerank: how many candidates the codes choose, of which the store's codes then choose the best k.

        Returns:
          Scores (inner products, cosines or squared distances) and ids. Where fewer than k vectors are found, which
          only happens under jit, scores are infinite and ids `FREE`.

        Raises:
          TypeError: the queries are no floating-point numbers.
          ValueError: they have another dimension or are not finite; there are fewer than k or `rerank` vectors; rerank
            is less than k, or there is no store.
        """
        y = check_vectors(queries, self.dim)
        candidates = self._check_counts(k, rerank)
        if not is_traced(y) and not bool(jnp.isfinite(y).all()):
            raise ValueError(f"expected finite queries, got {int((~jnp.isfinite(y)).sum())} NaN or Inf")
        scores, ids = _search(self, np.asarray(y) if self.sharding and not is_traced(y) else y, candidates, k)
        return scores, ids

    def shard(self, mesh: Mesh, axis: str) -> "Index":
        """The index on a mesh, its rows along an axis. Each shard is searched where it is, and the best are merged.

        With several processes (`jax.distributed`) each passes an index of vectors of its own, with the same quantizers,
        and ids that no other one has.

        Raises:
          ValueError: the mesh has no such axis, or the index is sharded.
        """
        self._check_whole("shard")
        if axis not in mesh.axis_names:
            raise ValueError(f"expected an axis of the mesh ({', '.join(mesh.axis_names)}), got {axis!r}")
        sharding = shards.of_rows(mesh, axis)
        rows = _grow(self.rows, shards.even(len(self.rows.ids), sharding) - len(self.rows.ids))
        quantizer, store = shards.copied((self.quantizer, self.store), sharding)
        return Index(quantizer, shards.placed(rows, sharding), store, self.metric, sharding)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index to a safetensors file; one that was there is replaced at once or stays as it was.

        Raises:
          ValueError: the index is sharded.
        """
        self._check_whole("save")
        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Index":
        """What `save` wrote. Raises as `storage.load` does, and a ValueError if it is something else."""
        index = storage.load(path)
        if not isinstance(index, cls):
            raise ValueError(f"expected an index in {path}, found a {type(index).__name__}")
        return index

    def _check_whole(self, what: str) -> None:
        if self.sharding is not None:
            raise ValueError(f"cannot {what} a sharded index; do so with the index that it was made from")

    def _check_counts(self, k: int, rerank: int | None) -> int:
        """How many candidates the codes choose."""
        rows = len(self.rows.ids) if is_traced(self.rows.ids) else len(self)
        if rows == 0:
            raise ValueError("the index is empty")
        k = check_int("k", k, 1, rows)
        if rerank is None:
            return k
        if self.store is None:
            raise ValueError("expected an index with a store to rerank with; pass store= to Index.build")
        return check_int("rerank", rerank, k, rows)


def _encode(quantizer: Quantizer, store: Quantizer | None, metric: str, x: Any, ids: Any, first: int) -> Rows:
    """Rows of checked vectors, a part at a time; ids from `first` on if they are not given."""
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected vectors of a floating-point dtype (float32, bfloat16, float16), got {x.dtype}")
    if x.ndim != 2 or x.shape[1] != quantizer.dim:
        raise ValueError(f"expected vectors (n, {quantizer.dim}), got shape {x.shape}")
    ids = _check_ids(first + np.arange(len(x)) if ids is None else ids, len(x))
    size = max(1, ENCODED // quantizer.dim)
    starts = range(0, max(1, len(x)), size)
    parts = [_encode_part(quantizer, store, metric, x, start, size) for start in starts]
    codes, energies, stored = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    return Rows(codes, jnp.asarray(ids), energies, stored)


def _encode_part(
    quantizer: Quantizer, store: Quantizer | None, metric: str, x: Any, start: int, size: int
) -> tuple[Codes, Any, Any]:
    low = max(0, min(start, len(x) - size))  # the last part overlaps the one before, so that nothing is compiled for it
    part = jnp.asarray(x[low : low + size])
    if not is_traced(part) and not bool(jnp.isfinite(part).all()):
        bad = int((~jnp.isfinite(part)).sum())
        raise ValueError(f"expected finite vectors, got {bad} NaN or Inf in vectors {low} to {low + len(part) - 1}")
    return jax.tree.map(lambda a: a[start - low :], _encoded(quantizer, store, metric, part))


@functools.partial(jax.jit, static_argnums=2)
def _encoded(quantizer: Quantizer, store: Quantizer | None, metric: str, x: Shaped[Array, "n d"]) -> Any:
    """Codes, energies, codes of the store."""
    x = ops.direction(x) if metric == "cosine" else as_float32(x)
    codes = quantizer.encode(x)
    energies = jnp.sum(x * quantizer.decode(codes), axis=-1) if metric == "l2" else None
    return codes, energies, None if store is None else store.encode(x)


def _check_ids(ids: Any, count: int) -> Int32[np.ndarray, "n"]:
    ids = np.asarray(ids)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"expected ids that are whole numbers, got {ids.dtype}")
    if ids.shape != (count,):
        raise ValueError(f"expected {count} ids, got shape {ids.shape}")
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**31:
        raise ValueError(f"expected ids from 0 to 2^31 - 1, got {ids.min()} to {ids.max()}")
    values, counts = np.unique(ids, return_counts=True)
    twice = values[counts > 1]
    if len(twice):
        raise ValueError(f"expected different ids, got {len(twice)} more than once, the first is {twice[0]}")
    return ids.astype(np.int32)


@functools.partial(jax.jit, static_argnums=1)
def _grow(rows: Rows, count: int) -> Rows:
    """With free rows at the end."""

    def padded(array: Shaped[Array, "rows ..."]) -> Shaped[Array, "more ..."]:
        return jnp.pad(array, [(0, count)] + [(0, 0)] * (array.ndim - 1))

    ids = jnp.pad(rows.ids, (0, count), constant_values=FREE)
    return dataclasses.replace(jax.tree.map(padded, rows), ids=ids)


@jax.jit
def _put(rows: Rows, new: Rows, places: Int32[Array, "n"]) -> Rows:
    return jax.tree.map(lambda array, part: array.at[places].set(part), rows, new)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _search(index: Index, y: Shaped[Array, "*m d"], candidates: int, k: int) -> tuple[Array, Array]:
    queries = as_float32(y).reshape(-1, index.dim)
    queries = ops.direction(queries) if index.metric == "cosine" else queries
    find = functools.partial(_candidates, index.metric, candidates)
    arguments = (index.quantizer, index.store if candidates > k else None), index.rows, queries
    if index.sharding is None:
        keys, finals, ids = find(*arguments)
    else:
        keys, finals, ids = shards.gathered(find, index.sharding, *arguments)
    _, finals, ids = largest(keys, candidates, finals, ids)
    keys, ids = largest(finals, k, ids)
    scores = jnp.sum(queries**2, axis=1, keepdims=True) - 2 * keys if index.metric == "l2" else keys
    return scores.reshape(*y.shape[:-1], k), ids.reshape(*y.shape[:-1], k)


def _candidates(
    metric: str, count: int, quantizers: tuple[Quantizer, Quantizer | None], rows: Rows, y: Float[Array, "m d"]
) -> tuple[Float[Array, "m count"], Float[Array, "m count"], Int32[Array, "m count"]]:
    """The rows that score best: by their codes, by the store's (by their codes if there is none), ids."""
    quantizer, store = quantizers
    bias = jnp.where(rows.ids == FREE, -jnp.inf, 0 if rows.energies is None else -rows.energies / 2)
    keys, found = scan(quantizer, rows.codes, bias, y, min(count, len(bias)))
    ids = jnp.where(keys > -jnp.inf, rows.ids[found], FREE)
    if store is None:
        return keys, keys, ids

    def again(query: tuple[Array, Array]) -> Float[Array, "count"]:
        x = store.decode(jax.tree.map(lambda a: a[query[1]], rows.stored))
        return ops.inner(query[0], x) - (jnp.sum(x**2, axis=1) / 2 if metric == "l2" else 0)

    finals = lax.map(again, (y, found))
    return keys, jnp.where(ids == FREE, -jnp.inf, finals), ids
