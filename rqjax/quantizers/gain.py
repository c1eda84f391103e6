"""Gain-shape quantization with a weighted norm as the gain, in eight bits."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from rqjax.arrays import norms
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, check_fits, check_vectors, pytree
from rqjax.quantizers.combinators import Multiplied


@pytree
class Gain(Multiplied):
    """Divides vectors by a gain, the root of sum_i weights[i] x[i]^2 on a scale of eighths of octaves around 1.

    With the weights 1 / (d variance[i]) the loud coordinates of a spectrum do not rule the gain, which is 1 for a
    typical vector. A vector that is loud where typical ones are quiet has a gain far too large. If the gain is more
    than twice the best one for its codes, the best one is stored. The least gain is stored as 0, so no vector decodes
    to one that is much farther from it than 0. Codes: (gains (*n,) as uint8, inner codes).

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Gain(jnp.ones(64) / 64, rqjax.lloyd_max(64, 3)).bits_per_vector
      200
    """

    weights: Float[Array, "d"]
    inner: Quantizer

    def __post_init__(self):
        check_fits(weights=self.weights, inner=self.inner.dim)

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        gains = nearest_gains(x, self.weights)
        codes = self.inner.encode(x / gain_of(gains)[..., None])
        decoded = self.inner.decode(codes)
        product, square = jnp.sum(x * decoded, axis=-1), jnp.sum(decoded**2, axis=-1)
        best = _nearest((jnp.maximum(product, 0) / jnp.where(square > 0, square, 1)) ** 2)
        return jnp.where(gains > best.astype(jnp.int32) + norms.PER_OCTAVE, best, gains), codes

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        gain = gain_of(nearest_gains(lax.stop_gradient(x), self.weights))[..., None]
        return gain * self.inner.relaxed(x / gain, leaf)


def nearest_gains(x: Float[Array, "*n d"], weights: Float[Array, "d"]) -> UInt8[Array, "*n"]:
    """Index of the gain of each vector; the least one for zero vectors."""
    return _nearest(jnp.sum(weights * x**2, axis=-1))


def gain_of(index: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """Gain by which vectors are divided; never 0."""
    return jnp.exp2(norms.octaves(index))


def _nearest(square: Float[Array, "*n"]) -> UInt8[Array, "*n"]:
    """Index of the gain nearest to the root of `square`."""
    return norms.of_octaves(jnp.log2(square) / 2)
