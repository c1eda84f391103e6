"""A quantizer of its own for each cell of a coarse one (LOPQ)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from rqjax.arrays.kmeans import nearest
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Queries, Vectors, Wrapper, check_vectors, pytree


@pytree
class Local(Wrapper):
    """What is left of the nearest of a few centers goes to the quantizer of that center. Codes: (cells uint8 (*n,),
    inner codes).

    The arrays of `inner` have the cells as their first axis, as `jax.vmap` makes them. Everything is computed for each
    cell: there should be few. Source: Kalantidis & Avrithis, 2014.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> x = jax.random.normal(jax.random.key(0), (300, 8))
      >>> rqjax.lopq(jax.random.key(1), x, bits=2).centers.shape  # of two cells
      (2, 8)
    """

    centers: Float[Array, "cells d"]
    inner: Quantizer

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        cell = nearest(x.reshape(-1, self.dim), as_float32(self.centers)).reshape(x.shape[:-1]).astype(jnp.uint8)
        codes = jax.vmap(lambda center, quantizer: quantizer.encode(x - center))(self.centers, self.inner)
        return cell, jax.tree.map(lambda codes: _chosen(codes, cell), codes)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        cell, inner = codes
        decoded = jax.vmap(lambda quantizer: quantizer.decode(inner))(self.inner)
        return _chosen(decoded, cell) + self.centers[cell]

    def dot(self, y: Queries, codes: Codes) -> Float[Array, "*mn"]:
        cell, inner = codes
        y = check_vectors(y, self.dim)
        products = jax.vmap(lambda q, center: q.dot(y, inner) + (as_float32(y) @ center)[(..., *[None] * cell.ndim)])
        return _chosen(products(self.inner, self.centers), cell, y.ndim - 1)


def _chosen(a: Array, cell: UInt8[Array, "*n"], skip: int = 0) -> Array:
    """Of arrays (cells, *skipped, *n, ...) those of each vector's cell."""
    index = cell.reshape(1, *[1] * skip, *cell.shape, *[1] * (a.ndim - 1 - skip - cell.ndim))
    return jnp.take_along_axis(a, index.astype(jnp.int32), axis=0)[0]
