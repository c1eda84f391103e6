"""A coarse quantizer before another one: what an inverted file is made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rqjax.arrays import blocks, norms
from rqjax.arrays.kmeans import lloyd, nearest, spread
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Key, Quantizer, Vectors, check_vectors, operation, pytree, random, static

START, ITERATIONS = 8, 10
"""Vectors a cell that k-means++ chooses among, and iterations of Lloyd."""


@pytree
class Cells(Quantizer):
    """Vectors, or what the nearest of many centroids leaves of them, in the codes of another quantizer. Codes: (cells
    int32 (*n,), inner codes).

    All cells have the same inner quantizer; `Local` has one for each.
    """

    centroids: Float[Array, "cells d"]
    inner: Quantizer
    residual: bool = static(default=True)
    """Whether the centroid is subtracted."""

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
    key: Key, x: Any, cells: int, sample: int, metric: str
) -> tuple[Float[Array, "cells d"], Float[Array, "d"] | None]:
    """Centroids of `sample` of the vectors (n, d), of their directions for the metric "cosine"; a random one of each
    n / sample consecutive vectors is read. For the metric "l2" they are relative to the mean, which is returned, too.
    """
    first, second, third = random.split(key, 3)
    places = np.arange(sample) + np.asarray(random.uniform(first, (sample,)), np.float64)
    chosen = jnp.asarray(x[np.minimum(places * (len(x) / sample), len(x) - 1).astype(np.int64)])
    few = random.permutation(second, sample)[: START * cells]
    chosen = norms.direction(chosen) if metric == "cosine" else as_float32(chosen)
    center = chosen.mean(axis=0) if metric == "l2" else None
    return _kmeans(third, chosen if center is None else chosen - center, few, cells=cells), center


@operation
def _kmeans(key: Key, x: Float[Array, "n d"], few: Array, *, cells: int) -> Float[Array, "cells d"]:
    return lloyd(x, spread(key, x[few], cells), ITERATIONS)
