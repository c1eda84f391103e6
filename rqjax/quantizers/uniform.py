"""Round-to-nearest on one grid that is known beforehand."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8, UInt32

from rqjax.arrays import packing
from rqjax.arrays.planes import as_float32
from rqjax.core import Quantizer, Vectors, check_int, check_vectors, pytree, static
from rqjax.core.products import rounded_to

MAX_BITS = 16


@pytree
class Uniform(Quantizer):
    """Coordinates as low + step * index. Codes: packed indices, uint8 (*n, bytes).

    The grid belongs to the quantizer, where `Affine` stores one with each group of coordinates. Numbers outside the
    grid go to its nearest end.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.Uniform(jnp.float32(0), jnp.float32(1), dim=4, bits=2)
      >>> q.decode(q.encode(jnp.array([0.2, 1.6, 9.0, -1.0]))).tolist()
      [0.0, 2.0, 3.0, 0.0]
    """

    low: Float[Array, "..."]
    """Lowest level; it and the step are numbers, or arrays that broadcast to vectors."""
    step: Float[Array, "..."]
    """Step of the grid; where it is 0, so is every index."""
    dim: int = static(kw_only=True)
    bits: int = static(kw_only=True)

    def __post_init__(self):
        check_int("bits", self.bits, 1, MAX_BITS)

    def encode(self, x: Vectors) -> UInt8[Array, "*n bytes"]:
        offset = as_float32(check_vectors(x, self.dim)) - as_float32(self.low)
        step = as_float32(self.step)
        index = jnp.where(step > 0, jnp.round(offset / jnp.where(step > 0, step, 1)), 0)
        return packing.pack_bytes(jnp.clip(index, 0, 2**self.bits - 1).astype(jnp.uint32), self.bits)

    def indices(self, codes: UInt8[Array, "*n bytes"]) -> UInt32[Array, "*n d"]:
        """The place of each coordinate on the grid."""
        return packing.unpack_bytes(codes, self.bits, self.dim)

    def decode(self, codes: UInt8[Array, "*n bytes"]) -> Float[Array, "*n d"]:
        return as_float32(self.low) + as_float32(self.step) * self.indices(codes)

    @classmethod
    def of(cls, x: Float[Array, "*n d"], bits: int, *, axis: int | None = None) -> "Uniform":
        """Makes the grid from the least to the greatest number of x, or of each slice along an axis, in the dtype of
        x."""
        low, high = (as_float32(f(x, axis=axis, keepdims=axis is not None)) for f in (jnp.min, jnp.max))
        step, least = (high - low) / (2**bits - 1), float(jnp.finfo(x.dtype).tiny)
        step = jnp.where((step > 0) & (step < least), least, step)  # what is smaller may be rounded to 0
        low, step = (rounded_to(a, x.dtype) for a in (low, step))
        return cls(low, step, dim=x.shape[-1], bits=bits)

    @classmethod
    def symmetric(cls, x: Float[Array, "*n d"], bits: int) -> "Uniform":
        """Makes the grid from minus to plus the largest magnitude, with 0 on it: round-to-nearest as it is usually
        meant."""
        half = max(1, 2 ** (bits - 1) - 1)
        step = jnp.abs(x).max() / half
        return cls(-half * step, step, dim=x.shape[-1], bits=bits)
