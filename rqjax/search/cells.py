"""Lists of an inverted file: their centroids, and their rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from rqjax.arrays import norms
from rqjax.arrays.kmeans import lloyd, nearest, spread
from rqjax.arrays.planes import as_float32
from rqjax.core import Key, Quantizer, check_int, is_traced, operation, random
from rqjax.quantizers.exact import Exact
from rqjax.search.centers import Cells, fitted, measured, sampled
from rqjax.search.ids import free, kept
from rqjax.search.rows import Rows, alike, taken

SAMPLE = 64
"""Vectors per list that centroids are learned from."""
START, ITERATIONS = 8, 10
"""Vectors per cell that k-means++ chooses among, and iterations of Lloyd."""


def learned(
    key: Key, x: Any, lists: int, sample: int | None, metric: str, inner: Any, residual: bool
) -> tuple[Cells, Float[Array, "d"] | None]:
    """Learns centroids from `sample` of the vectors (n, d), from their directions for the metric "cosine". One random
    vector of each n / sample consecutive ones is read. For the metric "l2" centroids are relative to the mean, which is
    returned, too. If `inner` is a function, it fits a quantizer to what centroids leave of vectors.

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

    def left(x: Array) -> Array:
        return x - centroids[nearest(x, centroids)] if residual else x

    if not isinstance(inner, Quantizer):
        some = sampled(x, to_fit=True)
        some = norms.direction(some) if metric == "cosine" else some
        inner = fitted(inner, left(some if center is None else some - center))
    if not residual or isinstance(inner, Exact):
        return Cells(centroids, inner, jnp.float32(1), residual=residual), center
    gain = measured(inner, left(sampled(chosen)))[1]
    return Cells(centroids, inner, gain, along=metric != "l2"), center


@operation
def _kmeans(key: Key, x: Float[Array, "n d"], few: Array, *, cells: int) -> Float[Array, "cells d"]:
    return lloyd(x, spread(key, x[few], cells), ITERATIONS)


def in_lists(rows: Rows, lists: int, count: int) -> tuple[Rows, Int32[Array, "bounds"]]:
    """Sorts rows with the codes of `Cells`, list after list and free ones last, into `count` rows with inner codes.
    Also returns where each list begins.

    Shapes do not depend on the lists' shares, so it works under jit. Known rows are sorted by NumPy, in a third of the
    time.
    """
    np_: Any = jnp if is_traced(rows.ids) else np
    cell = np_.where(free(rows.ids), lists, rows.codes[0])
    places = np_.lexsort((cell,))  # stable in both
    starts = np_.searchsorted(cell[places], np.arange(lists + 1))
    places = np_.pad(places[:count], (0, max(0, count - len(cell))), constant_values=len(cell))
    return taken(dataclasses.replace(rows, codes=rows.codes[1]), places), jnp.asarray(starts, jnp.int32)


def with_cells(rows: Rows, starts: Int32[Array, "bounds"]) -> Rows:
    """Adds to the rows of `in_lists` their cells, so that they have the codes of `Cells`."""
    lists, count = len(starts) - 1, len(rows.ids)
    traced = is_traced(starts)
    np_: Any = jnp if traced else np
    own = np.arange(lists + 1, dtype=np.int32) % lists  # free rows at the end are said to be of the first list
    cell = np_.repeat(own, np_.diff(starts, append=count), **({"total_repeat_length": count} if traced else {}))
    return dataclasses.replace(rows, codes=(jnp.asarray(cell), rows.codes))


def joined(rows: Rows, starts: Int32[Array, "bounds"], new: Rows, count: int) -> tuple[Rows, Int32[Array, "bounds"]]:
    """Adds rows with the codes of `Cells` to those of `in_lists`, as many as find a place in `count` rows."""
    fits = jnp.arange(len(new.ids)) < count - jnp.sum(~free(rows.ids))
    new = dataclasses.replace(new, ids=kept(fits, new.ids))
    both = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *alike(with_cells(rows, starts), new))
    return in_lists(both, len(starts) - 1, count)
