"""K-means of many groups of vectors, one after the other, in bounded memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rqjax.arrays.blocks import in_blocks
from rqjax.core import Key, check_int, operation, random

BLOCK_DISTANCES = 2**19
"""Distances that are held at a time: 2 MiB, which stay in a core's cache."""


@operation
def kmeans(key: Key, x: Float[Array, "groups n d"], k: int, iterations: int = 20) -> Float[Array, "groups k d"]:
    """Centroids of each group: k-means++, then Lloyd's iterations.

    Args:
      key: random key of the first centroids.
      x: vectors.
      k: number of centroids, at most n.
      iterations: number of Lloyd's iterations.

    Raises:
      ValueError: k is not from 1 to n.
    """
    k = check_int("k, the number of centroids,", k, 1, x.shape[1])

    def one(args: tuple[Array, Array]) -> Array:
        key, x = args
        return lloyd(x, spread(key, x, k), iterations)

    return lax.map(one, (random.split(key, len(x)), x))


def spread(key: Key, x: Float[Array, "n d"], k: int) -> Float[Array, "k d"]:
    """Chooses k vectors one after another, each with probability proportional to its squared distance to the nearest
    one chosen so far. Source: k-means++ (Arthur & Vassilvitskii, 2007).

    Each vector has an exponential clock that runs at the speed of its squared distance; the next to ring is chosen.
    Exponentials have no memory: the other clocks go on with the time they have left, and nothing new is drawn.
    """
    lanes = x.T

    def choose(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], Array]:
        left, speed = carry
        time = jnp.where(speed > 0, left / jnp.where(speed > 0, speed, 1), jnp.inf)
        least = time.min()
        centroid = x[_first(time == least)]
        distance = jnp.sum((lanes - centroid[:, None]) ** 2, axis=0)
        left = jnp.where(jnp.isfinite(least), left - speed * least, left)
        return (left, jnp.minimum(speed, distance)), centroid

    clocks = random.exponential(key, (len(x),))
    return lax.scan(choose, (clocks, jnp.full(len(x), 1e30)), None, k)[1]


def lloyd(x: Float[Array, "n d"], centroids: Float[Array, "k d"], iterations: int) -> Float[Array, "k d"]:
    """Runs Lloyd's iterations. A centroid without vectors moves to one of the vectors that are farthest from theirs."""
    counted = jnp.pad(x, ((0, 0), (0, 1)), constant_values=1)
    k, energy = len(centroids), jnp.sum(x**2, axis=1)

    def step(_: Array, centroids: Array) -> Array:
        index, distance = _nearest(x, centroids)
        sums = jax.ops.segment_sum(counted, index, k)
        empty = sums[:, -1] == 0

        def fill(centroids: Array) -> Array:
            farthest = jnp.argsort(-(distance + energy))[:k]
            return jnp.where(empty[:, None], x[farthest[jnp.cumsum(empty) - 1]], centroids)

        return lax.cond(empty.any(), fill, lambda c: c, sums[:, :-1] / jnp.maximum(sums[:, -1:], 1))

    return lax.fori_loop(0, iterations, step, centroids)


def nearest(x: Float[Array, "n d"], centroids: Float[Array, "k d"]) -> Int[Array, "n"]:
    """The index of the nearest centroid, of equally near ones the first."""
    return _nearest(x, centroids)[0]


def _nearest(x: Float[Array, "n d"], centroids: Float[Array, "k d"]) -> tuple[Int[Array, "n"], Float[Array, "n"]]:
    """Indices of the nearest centroids, and squared distances minus |x|^2. The minimum is taken across lanes of
    vectors."""
    energy = jnp.sum(centroids**2, axis=1)[:, None]

    def block(x: Array) -> tuple[Array, Array]:
        distances = energy - 2 * jnp.matmul(centroids, x.T, precision=lax.Precision.HIGHEST)
        least = distances.min(axis=0)
        return _first(distances == least), least

    return in_blocks(block, x, rows=max(1, BLOCK_DISTANCES // len(centroids)))


def _first(true: Bool[Array, "k *n"]) -> Int[Array, "*n"]:
    """Index of the first true entry along the first axis, or the last index if none is true. A CPU does not vectorize
    `argmax`."""
    order = jnp.arange(len(true)).reshape(-1, *[1] * (true.ndim - 1))
    return jnp.where(true, order, len(true) - 1).min(axis=0)
