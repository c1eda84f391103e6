"""Nearest neighbors over codes: an index holds the codes of vectors in rows, and a search scans them.

Every quantizer serves. An index takes as long to build as its vectors to encode (TurboQuant, section 4.4), and a search
takes memory for the codes and one block of scores: the vectors are never decoded.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32, Shaped

from rqjax.core import Quantizer, operation, pytree, static
from rqjax.core.mesh import along, copied, placed
from rqjax.search import filters, ranking, shards
from rqjax.search.rows import FREE, Rows, centered, check_matrix, encode, encode_more, grow, put
from rqjax.search.scan import largest, scan

IN_MEMORY = 2**20
"""Rows of a file at a time."""


@pytree
class Index(ranking.Searched):
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
    center: Float[Array, "d"] | None = None
    """Subtracted from vectors and queries, for the metric "l2": `quantizer` and `store` are of what is left."""
    sharding: NamedSharding | None = static(default=None)
    """Of the rows, if they are on a mesh."""

    @classmethod
    def build(
        cls,
        quantizer: Quantizer,
        x: Any,
        *,
        ids: Any = None,
        metric: str = "ip",
        store: Quantizer | None = None,
    ) -> "Index":
        """An index of vectors.

        Args:
          quantizer: any. `Centered` subtracts a mean first; `Scaled` of mode "unbiased" makes inner products unbiased.
          x: vectors (n, d), n may be 0: of jax, NumPy, PyTorch, or lists. Of a memory-mapped file a part is read at a
            time.
          ids: n different whole numbers from 0 to 2^31 - 1; if not given, 0 to n - 1.
          metric: "ip" finds the largest inner products, "cosine" those of directions, "l2" the least squared distances
            |q|^2 - 2 <q, x~> + <x, x~>, for which 4 bytes more a vector are stored, or 0 where that is below. By
            whatever factor a quantizer shrinks inner products, both of these terms shrink alike, and the order stays.
            All are relative to the mean of `Centered`, or to that of vectors that `Exact` keeps.
          store: keeps codes of its own, which the best candidates can be scored again with: `Exact(dim, "float16")`, or
            `rtn` at 8 bits.

        Raises:
          TypeError: x does not hold floating-point numbers, or ids are not whole.
          ValueError: shapes do not agree, x is not finite, ids are not different or out of range, or there is no such
            metric; or the codes of a vector overflow, as those beyond 65,504 in float16 do.
        """
        ranking.check_parts(quantizer, store, metric)
        x = check_matrix(x, quantizer.dim)
        quantizer, center = centered(quantizer, x) if metric == "l2" else (quantizer, None)
        return cls(quantizer, encode(quantizer, store, metric, center, x, ids, first=0), store, metric, center)

    def add(self, x: Any, *, ids: Any = None) -> "Index":
        """With more vectors. They take free rows; where there are too few, rows grow by an eighth at least.

        Args:
          x: vectors (n, d).
          ids: as in `build`, none of them in the index; if not given, those that follow the largest there.

        Raises:
          TypeError, ValueError: as in `build`; or an id is in the index, or the index is sharded.
        """
        self._check_whole("add to")
        old = np.asarray(self.rows.ids)
        new = encode_more(self.quantizer, self.store, self.metric, self.center, x, ids, self.rows)
        free = np.flatnonzero(old == FREE)
        missing = len(new.ids) - len(free)
        rows = grow(self.rows, max(missing, len(old) // 8)) if missing > 0 else self.rows
        places = np.concatenate([free, np.arange(len(old), len(rows.ids))], dtype=np.int32)[: len(new.ids)]
        return dataclasses.replace(self, rows=put(rows, new, places))

    def search(
        self,
        queries: Any,
        k: int,
        *,
        where: Any = None,
        rerank: int | None = None,
        implementation: str | None = None,
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
        y = self._checked(queries, k, rerank)
        index = self
        if where is not None:
            most = len(self.rows.ids) // 4 if self.sharding is None and not self._mapped else None
            rows, _ = filters.narrowed(self.rows, filters.check_filter(where), rerank or k, most)
            index = dataclasses.replace(self, rows=rows)
        found = _in_parts if self._mapped else search
        keys, ids = found(index, y, k=int(k), rerank=rerank, implementation=implementation)
        return ranking.scores(self.metric, keys), ids

    def shard(self, mesh: Mesh, axis: str) -> "Index":
        """The index on a mesh, its rows along an axis. Each shard is searched where it is, and the best are merged.

        With several processes (`jax.distributed`) each passes an index of vectors of its own, with the same quantizers,
        and ids that no other one has.

        Raises:
          TypeError: it is no mesh.
          ValueError: the mesh has no such axis, or the index is sharded.
        """
        self._check_whole("shard")
        sharding = along(mesh, axis)
        rows = grow(self.rows, shards.even(len(self.rows.ids), sharding) - len(self.rows.ids))
        quantizer, store, center = copied((self.quantizer, self.store, self.center), sharding)
        return Index(quantizer, placed(rows, sharding), store, self.metric, center, sharding)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mapped: bool = False) -> "Index":
        """What `save` wrote.

        Args:
          path: of the file.
          mapped: whether rows stay in the file, which may be larger than memory: a search has `IN_MEMORY` of them in
            memory at a time. With a store, each part has candidates of its own.

        Raises:
          As `storage.load` does, and a ValueError if it is something else.
        """
        index = cls._of_file(path, mapped)
        quantizer, store, center = jax.tree.map(jnp.asarray, (index.quantizer, index.store, index.center))
        return dataclasses.replace(index, quantizer=quantizer, store=store, center=center)

    @property
    def _mapped(self) -> bool:
        return isinstance(jax.tree.leaves(self.rows.codes)[0], np.ndarray)


def _in_parts(
    index: Index, y: Array | np.ndarray, *, k: int, rerank: int | None, **options: Any
) -> tuple[Array, Array]:
    """`search` of a part of the rows after the other."""
    count = len(index.rows.ids)
    size = min(count, max(IN_MEMORY, rerank or k))
    parts = []
    for start in range(0, count, size):
        low = min(start, count - size)  # the last part overlaps the one before: nothing is compiled for it
        rows = jax.tree.map(lambda a, low=low: jnp.asarray(a[low : low + size]), index.rows)
        rows = dataclasses.replace(rows, ids=rows.ids.at[: start - low].set(FREE))
        parts.append(search(dataclasses.replace(index, rows=rows), y, k=k, rerank=rerank, **options))
    keys, ids = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=-1), *parts)
    return largest(keys, k, ids)


@operation
def search(index: Index, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None) -> tuple[Array, Array]:
    return search_with(index, y, k=k, rerank=rerank)


def search_with(index: Index, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None) -> tuple[Array, Array]:
    """`Index.search` of what has been checked: keys, of which `ranking.scores` makes scores, and ids."""
    return ranking.ranked(_candidates, index, (index.quantizer,), index.rows, y, k=k, rerank=rerank)


def _candidates(
    metric: str, count: int, quantizers: tuple[Quantizer | None, Quantizer], rows: Rows, y: Float[Array, "m d"]
) -> ranking.Candidates:
    store, quantizer = quantizers
    keys, found = scan(quantizer, rows.codes, rows.bias, y, min(count, len(rows.ids)))
    return ranking.rescored(metric, store, rows, y, keys, found)
