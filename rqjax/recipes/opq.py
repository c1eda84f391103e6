"""Product quantization after a rotation that is fitted with it, for all vectors or for each cell of them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rqjax.arrays.kmeans import kmeans, lloyd, nearest
from rqjax.core import Key, random
from rqjax.quantizers.combinators import Rotated
from rqjax.quantizers.per_cell import PerCell
from rqjax.quantizers.product import Product, grouped
from rqjax.rotations import Dense

ROUNDS = 50
"""Rotations fitted, one after the other."""


def fit_opq(key: Key, x: Float[Array, "n d"], width: int, k: int) -> Rotated:
    """Fits non-parametric OPQ (Ge et al., 2013), beginning with a uniform rotation. Two steps take turns: the rotation
    that brings x nearest to the decoded vectors, and an iteration of k-means.

    Args and errors: as `Product.fit`.
    """
    first, second = random.split(key)
    start = Dense.haar(first, x.shape[1])

    def step(_: Array, fitted: tuple[Dense, Array]) -> tuple[Dense, Array]:
        rotation, centroids = fitted
        code = Product(centroids)
        y = rotation(x)
        rotation = Dense.procrustes(x, code.decode(code.encode(y)))
        groups = grouped(rotation(x), width)
        return rotation, lax.map(lambda pair: lloyd(*pair, iterations=1), (groups, centroids))

    centroids = kmeans(second, grouped(start(x), width), k)
    rotation, centroids = lax.fori_loop(0, ROUNDS, step, (start, centroids))
    return Rotated(rotation, Product(centroids))


def fit_lopq(key: Key, x: Float[Array, "n d"], width: int, k: int, cells: int = 2) -> PerCell:
    """Fits LOPQ (Kalantidis & Avrithis, 2014): OPQ of the residuals from the nearest of a few centers, for each center.

    Args and errors: as `Product.fit`; `cells` is the number of centers, if there are as many vectors. A cell of fewer
    vectors than others sees each of its vectors several times.
    """
    first, second = random.split(key)
    cells = min(cells, len(x))
    centers = kmeans(first, x[None], cells)[0]
    cell = nearest(x, centers)

    def one(args: tuple[Array, Array, Array]) -> Rotated:
        key, center, j = args
        members = jnp.argsort(cell != j, stable=True)[jnp.arange(len(x)) % jnp.maximum(1, (cell == j).sum())]
        return fit_opq(key, x[members] - center, width, k)

    return PerCell(centers, lax.map(one, (random.split(second, cells), centers, jnp.arange(cells))))
