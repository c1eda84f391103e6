"""A coarse quantizer before another one, of which an inverted file is made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from rqjax.arrays import blocks, norms
from rqjax.arrays.kmeans import lloyd, nearest, spread
from rqjax.arrays.planes import as_float32
from rqjax.core import (
    Codes,
    Key,
    Quantizer,
    Vectors,
    check_fits,
    check_int,
    check_vectors,
    is_traced,
    operation,
    pytree,
    random,
    static,
)
from rqjax.search.rows import FREE, Rows, taken

SAMPLE = 64
"""Vectors per list that centroids are learned from."""
START, ITERATIONS = 8, 10
"""Vectors per cell that k-means++ chooses among, and iterations of Lloyd."""


@pytree
class Cells(Quantizer):
    """Codes of vectors, or of their residuals from the nearest of many centroids, by another quantizer. Codes: (cells
    int32 (*n,), inner codes).

    All cells have the same inner quantizer; `PerCell` has one for each.
    """

    centroids: Float[Array, "cells d"]
    inner: Quantizer
    residual: bool = static(default=True, kw_only=True)
    """True if the centroid is subtracted."""

    def __post_init__(self):
        check_fits(centroids=self.centroids, inner=self.inner.dim)

    @property
    def dim(self) -> int:
        return self.inner.dim

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        cell = nearest(x.reshape(-1, self.dim), self.centroids).reshape(x.shape[:-1]).astype(jnp.int32)
        return cell, self.inner.encode(x - self.centroids[cell] if self.residual else x)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        x = self.inner.decode(codes[1])
        return x + self.centroids[codes[0]] if self.residual else x

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return blocks.inner(y, self.centroids), self.inner.prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        found = self.inner.scores(prepared[1], codes[1])
        if not self.residual:
            return found
        return found + jax.vmap(jax.vmap(lambda near, cell: near[:, cell]))(prepared[0], codes[0])


def learned(
    key: Key, x: Any, lists: int, sample: int | None, metric: str
) -> tuple[Float[Array, "cells d"], Float[Array, "d"] | None]:
    """Learns centroids from `sample` of the vectors (n, d), from their directions for the metric "cosine". One random
    vector of each n / sample consecutive ones is read. For the metric "l2" centroids are relative to the mean, which is
    returned, too.
    """
    if is_traced(x):
        raise TypeError("expected vectors whose numbers are known, got those of a function that is compiled")
    if not len(x):
        raise ValueError("expected at least 1 vector, got none")
    lists = check_int("lists", lists, 1, len(x))
    sample = check_int("sample", min(SAMPLE * lists, len(x)) if sample is None else sample, lists, len(x))
    first, second, third = random.split(key, 3)
    places = np.arange(sample) + np.asarray(random.uniform(first, (sample,)), np.float64)
    chosen = jnp.asarray(x[np.minimum(places * (len(x) / sample), len(x) - 1).astype(np.int64)])
    few = random.permutation(second, sample)[: START * lists]
    chosen = norms.direction(chosen) if metric == "cosine" else as_float32(chosen)
    center = chosen.mean(axis=0) if metric == "l2" else None
    return _kmeans(third, chosen if center is None else chosen - center, few, cells=lists), center


@operation
def _kmeans(key: Key, x: Float[Array, "n d"], few: Array, *, cells: int) -> Float[Array, "cells d"]:
    return lloyd(x, spread(key, x[few], cells), ITERATIONS)


def in_lists(rows: Rows, lists: int, count: int) -> tuple[Rows, Int32[Array, "bounds"]]:
    """Sorts rows that hold vectors, list after list, into `count` rows with inner codes; also returns where each list
    begins."""
    cell = np.where(np.asarray(rows.ids) == FREE, lists, np.asarray(rows.codes[0]))
    places = np.argsort(cell, kind="stable")
    sizes = np.bincount(cell, minlength=lists + 1)
    held = len(cell) - sizes[lists]
    places = np.pad(places[:held], (0, count - held), constant_values=len(cell))
    starts = np.concatenate([[0], np.cumsum(sizes[:lists])]).astype(np.int32)
    return taken(dataclasses.replace(rows, codes=rows.codes[1]), places), jnp.asarray(starts)


def with_cells(rows: Rows, starts: Int32[Array, "bounds"]) -> Rows:
    """Adds to the rows of `in_lists` their cells, so that they have the codes of `Cells`."""
    cell = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
    cell = jnp.asarray(np.pad(cell, (0, len(rows.ids) - len(cell))))
    return dataclasses.replace(rows, codes=(cell, rows.codes))
