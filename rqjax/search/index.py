"""Nearest neighbors over codes: an index holds the codes of vectors in rows, and a search scans them.

Every quantizer serves. An index takes as long to build as its vectors to encode (TurboQuant, section 4.4). A search
takes memory for the codes and one block of scores: the vectors are never decoded. With lists (an inverted file) a
search scans the rows of the lists that are nearest to a query.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Int32

from rqjax.core import Key, Quantizer, check_int, is_traced, nbytes, pytree, static, treefile
from rqjax.core.mesh import along, copied, placed
from rqjax.search import cells, filters, find, ids as names, prepared, ranking, shards
from rqjax.search.centers import Around, centered
from rqjax.search.ranges import within
from rqjax.search.rows import Rows, check_matrix, encode, grow, places_of, put, without

PROBES = 16


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
      >>> lists = rqjax.Index.build(index.quantizer, x, lists=20, key=jax.random.key(2))  # an inverted file
      >>> lists.search(x[:3], k=5, probes=4)[1][:, 0].tolist()
      [0, 1, 2]
    """

    quantizer: Quantizer
    """Quantizer of the vectors; `Cells` if there are lists."""
    rows: Rows
    """Rows of codes; with lists, list after list, and the inner codes of `quantizer`."""
    store: Quantizer | None
    metric: str = static(kw_only=True)
    center: Float[Array, "d"] | None = None
    """Center that is subtracted from vectors and queries, for the metric "l2": `quantizer` and `store` are of the
    differences. For other metrics the quantizer has it."""
    starts: Int32[Array, "bounds"] | None = None
    """First row of each list, and the row after the last one; of each shard, if they are on a mesh."""
    sharding: NamedSharding | None = static(default=None, kw_only=True)
    """Sharding of the rows, if they are on a mesh."""

    @property
    def dim(self) -> int:
        return self.quantizer.dim

    @property
    def lists(self) -> int:
        """Number of lists; 0 if the rows lie in none."""
        coarse: Any = self.quantizer
        return 0 if self.starts is None else len(coarse.centroids)

    @property
    def origin(self) -> Float[Array, "d"] | None:
        """Center of the vectors, or of their directions, that codes are relative to; None if that is 0."""
        return self.quantizer.center if isinstance(self.quantizer, Around) else self.center

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: the quantizers' own, centroids, codes, ids, and rows that are free."""
        return nbytes(self)

    @property
    def nbytes_in_file(self) -> int:
        """Bytes of `nbytes` that stay in a file (`Index.load`); the others are in memory."""
        return nbytes([leaf for leaf in jax.tree.leaves(self) if isinstance(leaf, np.memmap)])

    def __len__(self) -> int:
        return self.rows.held

    @classmethod
    def build(
        cls,
        quantizer: Quantizer | Callable[[Float[Array, "n d"]], Quantizer],
        x: Any,
        *,
        ids: Any = None,
        metric: str = "ip",
        store: Quantizer | None = None,
        lists: int | None = None,
        key: Key | None = None,
        residual: bool = True,
        sample: int | None = None,
        room: int = 0,
    ) -> "Index":
        """Builds an index of vectors.

        With lists, vectors lie in the list of the nearest of many centroids, which k-means learns. A search scores the
        vectors of the lists whose centroids are nearest to a query. Source: Jégou, Douze & Schmid, "Product
        quantization for nearest neighbor search", 2011, section IV.

        Args:
          quantizer: any; with lists it is of what centroids leave of the vectors. `Centered` subtracts its mean first.
            The mean of the vectors is subtracted unasked if codes then err less by a tenth, as 4,096 of them show.
            `Scaled` of mode "unbiased" makes inner products unbiased. A function, as `lambda x: rqjax.pq(key, x, 4)`,
            fits it to 20,000 vectors at most, in float32, as they are encoded: less their centroids, or without lists
            less their mean for "l2" and where the mean has a tenth of the energy.
          x: vectors (n, d) of floating-point numbers, int8 or uint8; n may be 0 without lists. They may be of jax,
            NumPy or PyTorch, or in Python's lists. A part of them is converted at a time, of a mapped file, too.
          ids: n different whole numbers from 0 to 2^63 - 1; if not given, 0 to n - 1. If one is beyond 2^31 - 1, each
            takes 8 bytes in the place of 4. Searches then return ids in NumPy's int64, or under jit their halves int32
            (..., 2), which `np.asarray(ids).view(np.int64)[..., 0]` joins.
          metric: "ip" finds the largest inner products, "cosine" those of directions, "l2" the least squared distances
            |q|^2 - 2 <q, x~> + <x, x~>, for which 4 bytes more a vector are stored, or 0 where that is below. By
            whatever factor a quantizer shrinks inner products, both of these terms shrink alike, and the order stays.
            All are relative to a center: the mean, also that of vectors that `Exact` keeps, or with lists a centroid.
            For "ip" and "cosine", 4 bytes more a vector make products with its center or centroid exact, and codes
            have the gain of the sample's.
          store: keeps codes of its own, which the best candidates can be scored again with: `Exact(dim, "float16")`, or
            `hadamard` at 8 bits.
          lists: number of lists; about the square root of n serves. None for no lists.
          key: random key of the sample that centroids are learned from, and of k-means; lists need one.
          residual: whether a vector's centroid is subtracted before it is encoded.
          sample: how many vectors centroids are learned from, in memory of 4 d bytes each; if not given, 64 a list.
          room: free rows for vectors that are added later.

        Raises:
          TypeError: x holds other numbers, ids are not whole, or there is no quantizer.
          ValueError: shapes do not agree, x is not finite, ids are not different or out of range, or there is no such
            metric; or the codes of a vector overflow, as those beyond 65,504 in float16 do. With lists: there are no
            vectors, fewer than lists, or than `sample`; `sample` is less than lists; or there is no key.
        """
        x = check_matrix(x, quantizer.dim if isinstance(quantizer, Quantizer) else None)
        ranking.check_parts(quantizer, store, metric, x.shape[1])
        room = check_int("room", room, 0, 2**31 - 1)
        if lists is None and (sample is not None or not residual):
            raise ValueError("residual and sample are options of lists: pass lists= and key=, too")
        if lists is None and key is None:
            quantizer, center = centered(quantizer, x, metric)
            rows = encode(quantizer, store, metric, center, x, ids, first=0)
            return cls(quantizer, grow(rows, room) if room else rows, store, center, metric=metric)
        if lists is None or key is None:
            raise ValueError("expected lists and a key to learn them with, got one without the other")
        quantizer, center = cells.learned(key, x, lists, sample, metric, quantizer, residual)
        rows = encode(quantizer, store, metric, center, x, ids, first=0)
        rows, starts = cells.in_lists(rows, len(quantizer.centroids), len(x) + room)
        return cls(quantizer, rows, store, center, starts, metric=metric)

    def add(self, x: Any, *, ids: Any = None) -> "Index":
        """Adds vectors, in the lists that there are. Where there are too few free rows, rows grow by an eighth at
        least.

        Under jit they do not grow: vectors for which no row is free, or no next id of 32 bits is left, are left out,
        and ids are not checked. `room` of `build` makes free rows.

        Args:
          x: vectors (n, d).
          ids: ids as in `build`, none of them in the index; if not given, those that follow the largest there.

        Raises:
          TypeError, ValueError: as in `build`; or an id is in the index, none follow, or the index is sharded.
        """
        self._check_whole("add to")
        old = count = len(self.rows.ids)
        if any(map(is_traced, jax.tree.leaves((self.rows.ids, x, ids)))):
            if ids is None and names.wide(self.rows.ids):
                raise ValueError("expected ids= to add to ids beyond 32 bits under jit")
            new = self._encoded(x, ids, jnp.max(self.rows.ids, initial=-1) + 1)
        else:
            known, added = names.known(self.rows.ids), names.check_list(() if ids is None else ids)
            names.check_range(added)  # pyright: ignore[reportArgumentType] - it is not traced
            twice = added[np.isin(added.astype(np.int64), known)]
            if len(twice):
                raise ValueError(f"{len(twice)} ids are in the index already, the first is {twice[0]}")
            new = self._encoded(x, ids, int(np.max(known, initial=-1)) + 1)
            missing = len(self) + len(new.ids) - old
            count += max(missing, old // 8) * (missing > 0)
        if self.starts is not None:
            rows, starts = cells.joined(self.rows, self.starts, new, count)
            return dataclasses.replace(self, rows=rows, starts=starts)
        rows = grow(self.rows, count - old) if count > old else self.rows
        return dataclasses.replace(self, rows=put(rows, new))

    def remove(self, ids: Any) -> "Index":
        """Removes some vectors, whose rows are free from then on.

        Raises:
          TypeError, ValueError: ids are no different whole numbers, one is not in the index, or the index is sharded.
        """
        self._check_whole("remove from")
        return dataclasses.replace(self, rows=without(self.rows, ids))

    def search(
        self,
        queries: Any,
        k: int | np.integer,
        *,
        probes: int | None = None,
        where: Any = None,
        rerank: int | np.integer | None = None,
        implementation: str | None = None,
    ) -> tuple[Float[Array, "*m k"], Int[Array | np.ndarray, "..."]]:
        """Finds the k vectors nearest to each query, the nearest first.

        Args:
          queries: (*m, d), of dtypes as in `build`.
          k: how many.
          probes: how many lists are looked into; if not given, 16, or all if there are fewer.
          where: filter of vectors; None for all. Booleans (n,): the id i passes if i < n and `where[i]`. Whole numbers
            (n,): ids, also such as are not in the index. A `range` of ids. If few pass, at most a quarter of the rows
            or as many as there are in `probes` lists, their codes are copied, and all of them are scored and no others,
            whatever list they are in.
          rerank: how many candidates the codes choose, of which the store's codes then choose the best k.
          implementation: "xla" for all quantizers and devices, "mps" for MLX's products on Apple GPUs, None for them
            wherever they can be taken.

        Returns:
          Scores (inner products, cosines or squared distances) and ids, int32 as long as all in the index are. Where
          fewer than k vectors are found, because fewer pass, are in the lists or, under jit, are there, scores are
          infinite and ids `FREE`.

        Raises:
          TypeError: the queries are of another dtype, or `where` is none of the three.
          ValueError: they have another dimension or are not finite; there are fewer than k or `rerank` vectors, or
            fewer lists than `probes`; rerank is less than k, or there is no store; `where` has another shape or ids
            below 0.
          Unsupported: there is no such kernel for this; the message says why.
        """
        y = ranking.check_queries(self, queries, k, rerank)
        k, rerank = int(k), None if rerank is None else int(rerank)
        if self.lists:
            probes = check_int("probes", min(PROBES, self.lists) if probes is None else probes, 1, self.lists)
        elif probes is not None:
            raise ValueError("expected an index with lists to look into; pass lists= and key= to Index.build")
        index = self
        if where is not None:
            most = len(self.rows.ids) * probes // self.lists if probes else len(self.rows.ids) // 4
            known = self.sharding is None and not self._mapped and not is_traced(self.starts)
            rows = self._coded() if known else self.rows
            rows, few = filters.narrowed(rows, filters.check_filter(where), rerank or k, most if known else None)
            if few:
                index, probes = dataclasses.replace(self, rows=rows, starts=None), None
            else:
                index = dataclasses.replace(self, rows=dataclasses.replace(self.rows, ids=rows.ids))
        found = find.search_in_parts if self._mapped else find.search
        keys, ids = found(index, y, k=k, rerank=rerank, probes=probes, implementation=implementation)
        return ranking.scores(self.metric, keys), names.returned(ids, wide=names.wide(self.rows.ids))

    def searcher(
        self,
        k: int | np.integer,
        *,
        probes: int | None = None,
        rerank: int | None = None,
        implementation: str | None = None,
    ) -> Callable[[Any], tuple[Float[Array, "*m k"], Int[Array | np.ndarray, "..."]]]:
        """Prepares searches of this index, for answers to one query after another.

        Args:
          k, probes, rerank, implementation: as in `search`.

        Returns:
          A function of queries (*m, d), which gives and raises what `search` does. It is compiled when it is first
          called with as many queries. A call then takes about 0.1 ms less than one of `search`.

        Raises:
          ValueError: as in `search`; or the rows are in a file.

        Example:
          >>> import jax, jax.numpy as jnp, rqjax
          >>> index = rqjax.Index.build(rqjax.Exact(4), jnp.eye(4))
          >>> find = index.searcher(k=1)
          >>> [find(jnp.eye(4)[i])[1].tolist() for i in (2, 0)]
          [[2], [0]]
        """
        if self._mapped:
            raise ValueError("expected an index in memory for prepared searches, got one whose rows are in a file")
        self.search(np.zeros((0, self.dim), np.float32), k, probes=probes, rerank=rerank)  # raises for wrong arguments
        return prepared.searcher(self, k=k, probes=probes, rerank=rerank, implementation=implementation)

    def range_search(self, queries: Any, radius: Any, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Finds all vectors within a radius, as FAISS's `range_search` does.

        Args:
          queries: (m, d); not under jit, where numbers of results are not known.
          radius: squared distances below it are within, and inner products or cosines above it.
          **options: `probes`, `where` and `implementation` as in `search`.

        Returns:
          Bounds int64 (m + 1,), scores float32 and ids: those of query i are from bounds[i] to bounds[i + 1], the
          nearest first.

        Raises:
          As `search` does; or a ValueError: queries are no matrix, or the radius is no number.

        Example:
          >>> import jax, numpy as np, rqjax
          >>> index = rqjax.Index.build(rqjax.Exact(2, "float32"), np.eye(2), metric="l2")
          >>> bounds, scores, ids = index.range_search(np.array([[1.0, 0.0], [9.0, 0.0]]), radius=3)
          >>> bounds.tolist(), ids.tolist()
          ([0, 2, 2], [0, 1])
        """
        return within(self, queries, radius, **options)

    def reconstruct(self, ids: Any) -> Float[Array, "n d"]:
        """Decodes the vectors of some ids (n,), by the store if there is one; of the metric "cosine" their directions.

        Raises:
          TypeError, ValueError: ids are no whole numbers, one is not in the index, or the index is sharded.
        """
        self._check_whole("reconstruct vectors of")
        places = places_of(self.rows, np.asarray(names.check_list(ids)))
        rows = self._coded()
        quantizer, codes = (self.store, rows.stored) if self.store else (self.quantizer, rows.codes)
        x = quantizer.decode(jax.tree.map(lambda a: jnp.asarray(a[places]), codes))
        return x if self.center is None else x + self.center

    def shard(self, mesh: Mesh, axis: str) -> "Index":
        """Places the index on a mesh, its rows or lists along an axis. Each shard is searched where it is, and the best
        are merged.

        With several processes (`jax.distributed`) each passes an index of vectors of its own, with the same quantizers,
        center and centroids, and ids that no other one has. One process may build an index, of a sample say, and each
        other add its vectors to what that one saved.

        Raises:
          TypeError: it is no mesh.
          ValueError: the mesh has no such axis, the index is sharded, or processes differ in quantizers or centers.
        """
        self._check_whole("shard")
        sharding = along(mesh, axis)
        shards.check_same((self.quantizer, self.store, self.center))
        parts = shards.parted(self.rows, self.starts, sharding)
        quantizer, store, center = copied((self.quantizer, self.store, self.center), sharding)
        rows, starts = placed(parts, sharding)
        return Index(quantizer, rows, store, center, starts, metric=self.metric, sharding=sharding)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the index to a safetensors file; one that was there is replaced at once or stays as it was.

        Raises:
          ValueError: the index is sharded.
        """
        self._check_whole("save")
        treefile.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, mapped: bool = False) -> "Index":
        """Reads an index that `save` wrote.

        Args:
          path: path of the file.
          mapped: whether rows stay in the file, which may be larger than memory: a search has `find.IN_MEMORY` bytes of
            them in memory at a time, and of the store it reads the candidates alone. No search of it is under jit.

        Raises:
          As `storage.load` does, and a ValueError if it is something else, or rows that are to stay lie in lists.
        """
        index, _ = treefile.load(path, mapped=mapped)
        if not isinstance(index, cls):
            raise ValueError(f"expected an Index in {path}, found a {type(index).__name__}")
        if mapped and index.lists:
            raise ValueError(f"expected an index without lists to leave in a file, found {index.lists} in {path}")
        quantizer, store, center = jax.tree.map(jnp.asarray, (index.quantizer, index.store, index.center))
        return dataclasses.replace(index, quantizer=quantizer, store=store, center=center)

    @property
    def _mapped(self) -> bool:
        return isinstance(jax.tree.leaves(self.rows.codes)[0], np.ndarray)

    def _encoded(self, x: Any, ids: Any, first: Any) -> Rows:
        return encode(self.quantizer, self.store, self.metric, self.center, x, ids, first=first)

    def _coded(self) -> Rows:
        """Rows with the codes of `quantizer`."""
        return self.rows if self.starts is None else cells.with_cells(self.rows, self.starts)

    def _check_whole(self, what: str) -> None:
        if self.sharding is not None:
            raise ValueError(f"cannot {what} a sharded index; do so with the index that it was made from")
