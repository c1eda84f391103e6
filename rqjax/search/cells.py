"""Lists of an inverted file: their centroids, and their rows."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from rqjax.arrays import norms
from rqjax.arrays.kmeans import lloyd, nearest, spread
from rqjax.arrays.planes import as_float32
from rqjax.core import Key, Quantizer, check_int, is_traced, operation, random
from rqjax.quantizers.exact import Exact
from rqjax.search.centers import Cells, measured, sampled
from rqjax.search.ids import free
from rqjax.search.rows import Rows, taken

SAMPLE = 64
"""Vectors per list that centroids are learned from."""
START, ITERATIONS = 8, 10
"""Vectors per cell that k-means++ chooses among, and iterations of Lloyd."""


def learned(
    key: Key, x: Any, lists: int, sample: int | None, metric: str, inner: Quantizer, residual: bool
) -> tuple[Cells, Float[Array, "d"] | None]:
    """Learns centroids from `sample` of the vectors (n, d), from their directions for the metric "cosine". One random
    vector of each n / sample consecutive ones is read. For the metric "l2" centroids are relative to the mean, which is
    returned, too.

    Vectors that are not `Exact` have shares of their centroids, but for "l2", and the gain of the sample's codes.
    """
    if is_traced(x):
        raise TypeError("expected vectors whose numbers are known, got those of a function that is compiled")
    if not len(x):
        raise ValueError("expected at least 1 vector, got none")
    lists = check_int("lists", lists, 1, len(x))
    sample = check_int("sample", min(SAMPLE * lists, len(x)) if sample is None else sample, lists, len(x))
    first, second, third = random.split(key, 3)
    places = np.arange(sample) + np.asarray(random.uniform(first, (sample,)), np.float64)
    places, back = np.unique(np.minimum(places * (len(x) / sample), len(x) - 1).astype(np.int64), return_inverse=True)
    chosen = jnp.asarray(np.asarray(x[places])[back])  # a file may take growing places alone
    few = random.permutation(second, sample)[: START * lists]
    chosen = as_float32(chosen)
    chosen = norms.direction(chosen) if metric == "cosine" else chosen
    center = chosen.mean(axis=0) if metric == "l2" else None
    chosen = chosen if center is None else chosen - center
    centroids = _kmeans(third, chosen, few, cells=lists)
    if not residual or isinstance(inner, Exact):
        return Cells(centroids, inner, jnp.float32(1), residual=residual), center
    some = sampled(chosen)
    gain = measured(inner, some - centroids[nearest(some, centroids)])[1]
    return Cells(centroids, inner, gain, along=metric != "l2"), center


@operation
def _kmeans(key: Key, x: Float[Array, "n d"], few: Array, *, cells: int) -> Float[Array, "cells d"]:
    return lloyd(x, spread(key, x[few], cells), ITERATIONS)


def in_lists(rows: Rows, lists: int, count: int) -> tuple[Rows, Int32[Array, "bounds"]]:
    """Sorts rows that hold vectors, list after list, into `count` rows with inner codes; also returns where each list
    begins."""
    cell = np.where(np.asarray(free(rows.ids)), lists, np.asarray(rows.codes[0]))
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
