"""Nearest neighbors over codes: an index holds the codes of vectors in rows, and a search scans them.

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

from rqjax.arrays import blocks, norms
from rqjax.arrays.planes import as_float32
from rqjax.core import (
    Implementation,
    Quantizer,
    Queries,
    Vectors,
    check_int,
    check_vectors,
    is_traced,
    nbytes,
    operation,
    pytree,
    static,
    treefile,
)
from rqjax.search import filters, shards
from rqjax.search.rows import FREE, Rows, check_ids, encode, grow, put
from rqjax.search.scan import largest, scan


@pytree
class Index:
    """An index as `Index.build` makes it. `add` and `remove` return another one.

    It is a pytree: searches may be parts of jit-compiled functions.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> x = jax.random.normal(jax.random.key(1), (1000, 64))
      >>> index = rqjax.Index.build(rqjax.turboquant_trellis(jax.random.key(0), 64, 4), x)
      >>> scores, ids = index.search(x[:3], k=5)
      >>> ids[:, 0].tolist()
      [0, 1, 2]
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
        with jax.ensure_compile_time_eval():  # under jit too, of an index that is a constant there
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
            metric; or the codes of a vector overflow, as those beyond 65,504 in float16 do.
        """
        if metric not in ("ip", "l2", "cosine"):
            raise ValueError(f"expected metric 'ip', 'l2' or 'cosine', got {metric!r}")
        if store is not None and store.dim != quantizer.dim:
            raise ValueError(f"expected a store of dimension {quantizer.dim}, got {store.dim}")
        if tile := next((part.tile for part in (quantizer, store) if part is not None and part.tile > 1), None):
            raise ValueError(f"expected codes of one vector each, got those of {tile} vectors together")
        return cls(quantizer, encode(quantizer, store, metric, x, ids, first=0), store, metric)

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
        new = encode(self.quantizer, self.store, self.metric, x, ids, first=int(old.max(initial=-1)) + 1)
        known = np.isin(new.ids, old)
        if known.any():
            first = np.asarray(new.ids)[known][0]
            raise ValueError(f"{known.sum()} ids are in the index already, the first is {first}")
        free = np.flatnonzero(old == FREE)
        missing = len(known) - len(free)
        rows = grow(self.rows, max(missing, len(old) // 8)) if missing > 0 else self.rows
        places = np.concatenate([free, np.arange(len(old), len(rows.ids))], dtype=np.int32)[: len(known)]
        return dataclasses.replace(self, rows=put(rows, new, places))

    def remove(self, ids: Any) -> "Index":
        """Without some vectors, whose rows are free from then on.

        Raises:
          TypeError, ValueError: ids are no different whole numbers, one is not in the index, or the index is sharded.
        """
        self._check_whole("remove from")
        old, ids = np.asarray(self.rows.ids), check_ids(ids, np.size(ids))
        unknown = ~np.isin(ids, old)
        if unknown.any():
            raise ValueError(f"{unknown.sum()} ids are not in the index, the first is {ids[unknown][0]}")
        left = jnp.where(np.isin(old, ids), FREE, self.rows.ids)
        return dataclasses.replace(self, rows=dataclasses.replace(self.rows, ids=left))

    def search(
        self,
        queries: Queries,
        k: int,
        *,
        where: Any = None,
        rerank: int | None = None,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "*m k"], Int32[Array, "*m k"]]:
        """The k vectors nearest to each query, the nearest first.

        Args:
          queries: (*m, d).
          k: how many.
          where: what may be found; None is all. Booleans (n,): the id i passes if i < n and `where[i]`. Whole numbers
            (n,): ids, also such as are not in the index. A `range` of ids. Of few that pass, a quarter of the rows at
            most, the codes are copied, and no others are scored.
          rerank: how many candidates the codes choose, of which the store's codes then choose the best k.
          implementation: "xla" for all quantizers and devices, "mps" for MLX's products on Apple GPUs, None for them
            wherever they can be taken.

        Returns:
          Scores (inner products, cosines or squared distances) and ids. Where fewer than k vectors are found, because
          fewer pass or, under jit, are there, scores are infinite and ids `FREE`.

        Raises:
          TypeError: the queries are no floating-point numbers, or `where` is none of the three.
          ValueError: they have another dimension or are not finite; there are fewer than k or `rerank` vectors; rerank
            is less than k, or there is no store; `where` has another shape or ids below 0.
          Unsupported: there is no such kernel for this; the message says why.
        """
        y = check_vectors(queries, self.dim)
        self._check_counts(k, rerank)
        index = self if where is None else self._passing(filters.check_filter(where), rerank or k)
        if not is_traced(y):
            with jax.ensure_compile_time_eval():
                bad = int((~jnp.isfinite(y)).sum())
            if bad:
                raise ValueError(f"expected finite queries, got {bad} NaN or Inf")
        y = np.asarray(y) if self.sharding and not is_traced(y) else y
        return _search(index, y, k=int(k), rerank=rerank, implementation=implementation)

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
        rows = grow(self.rows, shards.even(len(self.rows.ids), sharding) - len(self.rows.ids))
        quantizer, store = shards.copied((self.quantizer, self.store), sharding)
        return Index(quantizer, shards.placed(rows, sharding), store, self.metric, sharding)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index to a safetensors file; one that was there is replaced at once or stays as it was.

        Raises:
          ValueError: the index is sharded.
        """
        self._check_whole("save")
        treefile.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Index":
        """What `save` wrote. Raises as `storage.load` does, and a ValueError if it is something else."""
        index, _ = treefile.load(path)
        if not isinstance(index, cls):
            raise ValueError(f"expected an index in {path}, found a {type(index).__name__}")
        return index

    def _check_whole(self, what: str) -> None:
        if self.sharding is not None:
            raise ValueError(f"cannot {what} a sharded index; do so with the index that it was made from")

    def _passing(self, where: filters.Filter, count: int) -> "Index":
        """With what may be found, in fewer rows if it is little."""
        most = len(self.rows.ids) // 4 if self.sharding is None else None
        return dataclasses.replace(self, rows=filters.narrowed(self.rows, where, count, most)[0])

    def _check_counts(self, k: int, rerank: int | None) -> None:
        rows = len(self.rows.ids) if is_traced(self.rows.ids) else len(self)
        if rows == 0:
            raise ValueError("the index is empty")
        k = check_int("k", k, 1, rows)
        if rerank is not None:
            check_int("rerank", rerank, k, rows)
            if self.store is None:
                raise ValueError("expected an index with a store to rerank with; pass store= to Index.build")


@operation
def _search(index: Index, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None) -> tuple[Array, Array]:
    return search_with(index, y, k=k, rerank=rerank)


def search_with(index: Index, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None) -> tuple[Array, Array]:
    """`Index.search` of what has been checked."""
    candidates = rerank or k
    queries = as_float32(y).reshape(-1, index.dim)
    queries = norms.direction(queries) if index.metric == "cosine" else queries
    find = functools.partial(_candidates, index.metric, candidates)
    arguments = (index.quantizer, index.store if rerank else None), index.rows, queries
    if index.sharding is None:
        _, finals, ids = find(*arguments)
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
        return blocks.inner(query[0], x) - (jnp.sum(x**2, axis=1) / 2 if metric == "l2" else 0)

    finals = lax.map(again, (y, found))
    return keys, jnp.where(ids == FREE, -jnp.inf, finals), ids
