"""A quantizer of its own for each cell of a coarse one (LOPQ)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from rqjax.arrays.blocks import inner
from rqjax.arrays.kmeans import nearest
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, check_fits, check_vectors, pytree


@pytree
class PerCell(Quantizer):
    """Quantizes the residuals of the nearest of a few centers by the quantizer of that center. Codes: (cells uint8
    (*n,), inner codes).

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

    def __post_init__(self):
        check_fits(centers=self.centers, inner=self.inner.dim)

    @property
    def dim(self) -> int:
        return self.inner.dim

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        cell = nearest(x.reshape(-1, self.dim), as_float32(self.centers)).reshape(x.shape[:-1]).astype(jnp.uint8)
        codes = jax.vmap(lambda center, quantizer: quantizer.encode(x - center))(self.centers, self.inner)
        return cell, jax.tree.map(lambda codes: _chosen(codes, cell), codes)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        cell, inner = codes
        decoded = jax.vmap(lambda quantizer: quantizer.decode(inner))(self.inner)
        return _chosen(decoded, cell) + self.centers[cell]

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        # Cells last: the axes of sequences and of heads are where other quantizers have them.
        prepared = jax.vmap(lambda quantizer: quantizer.prepare(y), out_axes=-1)(self.inner)
        return prepared, jnp.moveaxis(inner(self.centers, y), 0, -1)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        found = jax.vmap(lambda quantizer, y: quantizer.scores(y, codes[1]), (0, -1))(self.inner, prepared[0])
        return _chosen(found + jnp.moveaxis(prepared[1], -1, 0)[..., None], codes[0][:, :, None])


def _chosen(a: Array, cell: UInt8[Array, "*n"]) -> Array:
    """Picks from arrays (cells, *n, ...) the entries of each vector's cell."""
    index = cell.reshape(1, *cell.shape, *[1] * (a.ndim - 1 - cell.ndim))
    return jnp.take_along_axis(a, index.astype(jnp.int32), axis=0)[0]
