"""An inverted file: an index whose vectors lie in lists, of which a search looks into the nearest."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int32, Shaped

from rqjax.core import Key, Quantizer, check_int, is_traced, operation, pytree, static
from rqjax.core.mesh import along, copied, placed
from rqjax.search import cells, filters, index, ranking, shards
from rqjax.search.cells import Cells
from rqjax.search.probe import probe
from rqjax.search.rows import FREE, Rows, check_matrix, encode, encode_more, taken

SAMPLE = 64
"""Vectors a list that centroids are learned from."""
PROBES = 16


@pytree
class IVF(ranking.Searched):
    """An inverted file as `IVF.build` makes it. `add` and `remove` return another one.

    Vectors lie in the list of the nearest of many centroids, and a search scores those of the lists whose centroids are
    nearest to a query. It is a pytree: searches may be parts of jit-compiled functions. Source: Jégou, Douze & Schmid,
    "Product quantization for nearest neighbor search", 2011, section IV.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> x = jax.random.normal(jax.random.key(1), (1000, 64))
      >>> ivf = rqjax.IVF.build(rqjax.turboquant_trellis(jax.random.key(0), 64, 4), x, lists=20, key=jax.random.key(2))
      >>> scores, ids = ivf.search(x[:3], k=5, probes=4)
      >>> ids[:, 0].tolist()
      [0, 1, 2]
    """

    quantizer: Cells
    rows: Rows
    """List after list, inner codes."""
    starts: Int32[Array, "bounds"]
    """The first row of each list, and the row after the last one; of each shard, if they are on a mesh."""
    store: Quantizer | None
    metric: str = static()
    center: Float[Array, "d"] | None = None
    """Subtracted from vectors and queries, for the metric "l2": `quantizer` and `store` are of what is left."""
    sharding: NamedSharding | None = static(default=None)
    """Of the rows, if they are on a mesh."""

    @property
    def lists(self) -> int:
        return len(self.quantizer.centroids)

    @classmethod
    def build(
        cls,
        quantizer: Quantizer,
        x: Any,
        *,
        key: Key,
        lists: int | None = None,
        ids: Any = None,
        metric: str = "ip",
        store: Quantizer | None = None,
        residual: bool = True,
        sample: int | None = None,
    ) -> "IVF":
        """An inverted file of vectors.

        Args:
          quantizer: any, of what centroids leave of the vectors.
          x: vectors (n, d). Of a memory-mapped file a part is read at a time.
          key: of the sample, and of the start of k-means.
          lists: how many; if not given, the square root of n.
          ids, metric, store: as in `Index.build`.
          residual: whether the centroid is subtracted before vectors are encoded.
          sample: how many vectors centroids are learned from, in memory of 4 d bytes each; if not given, 64 a list.

        Raises:
          TypeError, ValueError: as in `Index.build`; or there are no vectors, fewer than lists, or than `sample`; or
            `sample` is less than lists.
        """
        ranking.check_parts(quantizer, store, metric)
        x = check_matrix(x, quantizer.dim)
        if is_traced(x):
            raise TypeError("expected vectors whose numbers are known, got those of a function that is compiled")
        if not len(x):
            raise ValueError("expected at least 1 vector, got none")
        lists = check_int("lists", round(math.sqrt(len(x))) if lists is None else lists, 1, len(x))
        sample = check_int("sample", min(SAMPLE * lists, len(x)) if sample is None else sample, lists, len(x))
        centroids, center = cells.learned(key, x, lists, sample, metric)
        coarse = Cells(centroids, quantizer, residual)
        rows = encode(coarse, store, metric, center, x, ids, first=0)
        return cls(coarse, *_in_lists(rows, lists, len(x)), store, metric, center)

    def add(self, x: Any, *, ids: Any = None) -> "IVF":
        """With more vectors, in the lists that there are. Rows that are free are given up; where there are too few,
        rows grow by an eighth at least.

        Args:
          x: vectors (n, d).
          ids: as in `build`, none of them in the index; if not given, those that follow the largest there.

        Raises:
          TypeError, ValueError: as in `Index.build`; or an id is in the index, or the index is sharded.
        """
        self._check_whole("add to")
        new = encode_more(self.quantizer, self.store, self.metric, self.center, x, ids, self.rows)
        both = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), self._with_cells(), new)
        old, needed = len(self.rows.ids), both.held
        made, starts = _in_lists(both, self.lists, old if needed <= old else max(needed, old + old // 8))
        return dataclasses.replace(self, rows=made, starts=starts)

    def search(
        self, queries: Any, k: int, *, probes: int | None = None, where: Any = None, rerank: int | None = None
    ) -> tuple[Float[Array, "*m k"], Int32[Array, "*m k"]]:
        """The k vectors nearest to each query among those of the nearest lists, the nearest first.

        Args:
          queries: (*m, d).
          k: how many.
          probes: how many lists are looked into; if not given, 16, or all if there are fewer.
          where: what may be found, as in `Index.search`. Of few that pass, as many as there are in `probes` lists at
            most, all are scored, whatever list they are in.
          rerank: how many candidates the codes choose, of which the store's codes then choose the best k.

        Returns:
          Scores (inner products, cosines or squared distances) and ids. Where fewer than k vectors are found, scores
          are infinite and ids `FREE`.

        Raises:
          TypeError, ValueError: as in `Index.search`; or there are fewer lists than `probes`.
        """
        y = self._checked(queries, k, rerank)
        probes = check_int("probes", min(PROBES, self.lists) if probes is None else probes, 1, self.lists)
        rows = self.rows
        if where is not None:
            where, known = filters.check_filter(where), not is_traced(self.starts) and self.sharding is None
            most = len(rows.ids) * probes // self.lists if known else None
            rows, few = filters.narrowed(self._with_cells() if known else rows, where, rerank or k, most)
            if few:
                alone = index.Index(self.quantizer, rows, self.store, self.metric, self.center)
                keys, ids = index.search(alone, y, k=int(k), rerank=rerank)
                return ranking.scores(self.metric, keys), ids
            rows = dataclasses.replace(rows, codes=self.rows.codes)
        keys, ids = search(dataclasses.replace(self, rows=rows), y, k=int(k), rerank=rerank, probes=probes)
        return ranking.scores(self.metric, keys), ids

    def shard(self, mesh: Mesh, axis: str) -> "IVF":
        """The index on a mesh, its lists along an axis. Each shard is searched where it is, and the best are merged.

        With several processes (`jax.distributed`) each passes an index of vectors of its own, with the same quantizers
        and centroids, and ids that no other one has: one process builds an index, of a sample say, and each other adds
        its vectors to what that one saved.

        Raises:
          ValueError: the mesh has no such axis, or the index is sharded.
        """
        self._check_whole("shard")
        sharding = along(mesh, axis)
        sizes, own = np.diff(self.starts), shards.own(sharding)
        loads, of = np.zeros(own, int), np.zeros(self.lists, int)
        for i in np.argsort(-sizes, kind="stable"):  # the longest first, each to the shard with the fewest rows
            of[i] = loads.argmin()
            loads[of[i]] += sizes[i]
        size, shard_of_row = shards.even(loads.max() * own, sharding) // own, np.repeat(of, sizes)
        places = np.full((own, size), len(self.rows.ids))
        for i in range(own):
            places[i, : loads[i]] = np.flatnonzero(shard_of_row == i)
        starts = np.pad(np.cumsum(sizes * (of == np.arange(own)[:, None]), axis=1), ((0, 0), (1, 0)))
        parts = taken(self.rows, places.reshape(-1)), starts.reshape(-1).astype(np.int32)
        quantizer, store, center = copied((self.quantizer, self.store, self.center), sharding)
        rows, starts = placed(parts, sharding)
        return IVF(quantizer, rows, starts, store, self.metric, center, sharding)

    def _with_cells(self) -> Rows:
        """Rows with the codes of `quantizer`, in which each has its cell."""
        cell = np.repeat(np.arange(self.lists, dtype=np.int32), np.diff(self.starts))
        cell = jnp.asarray(np.pad(cell, (0, len(self.rows.ids) - len(cell))))
        return dataclasses.replace(self.rows, codes=(cell, self.rows.codes))


def _in_lists(rows: Rows, lists: int, count: int) -> tuple[Rows, Int32[Array, "bounds"]]:
    """`count` rows of those that hold vectors, list after list, and where each begins."""
    cell = np.where(np.asarray(rows.ids) == FREE, lists, np.asarray(rows.codes[0]))
    places = np.argsort(cell, kind="stable")
    sizes = np.bincount(cell, minlength=lists + 1)
    held = len(cell) - sizes[lists]
    places = np.pad(places[:held], (0, count - held), constant_values=len(cell))
    starts = np.concatenate([[0], np.cumsum(sizes[:lists])]).astype(np.int32)
    return taken(dataclasses.replace(rows, codes=rows.codes[1]), places), jnp.asarray(starts)


@operation
def search(ivf: IVF, y: Shaped[Array, "*m d"], *, k: int, rerank: int | None, probes: int) -> tuple[Array, Array]:
    """`IVF.search` of what has been checked: keys, of which `ranking.scores` makes scores, and ids."""

    def find(metric: str, count: int, quantizers: Any, lists: tuple[Rows, Array], y: Array) -> ranking.Candidates:
        (store, coarse), (rows, starts) = quantizers, lists
        closeness = -jnp.sum(coarse.centroids**2, axis=1) / 2 if metric == "l2" else jnp.zeros(len(coarse.centroids))
        rows = rows if store else dataclasses.replace(rows, stored=None)
        keys, places = probe(coarse, rows, starts, y, count, probes, closeness)
        return ranking.rescored(metric, store, rows, y, keys, places)

    return ranking.ranked(find, ivf, (ivf.quantizer,), (ivf.rows, ivf.starts), y, k=k, rerank=rerank)
