"""The scalar quantizer: the nearest level of one codebook, coordinate by coordinate."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Integer, Shaped, UInt32

from rqjax import codebooks
from rqjax.arrays import packing
from rqjax.arrays.levels import look_up, nearest
from rqjax.arrays.planes import planes
from rqjax.core import Codes, Vectors, check_int, check_vectors, pytree, static
from rqjax.scoring import integers
from rqjax.scoring.levels import Levels
from rqjax.scoring.tiles import KeyTile, ValueTile


@pytree
class Scalar(Levels):
    """Nearest level per coordinate. Codes: packed indices, uint32 (*n, words).

    The levels are `step * levels`. Lloyd-Max codebooks of up to 4 bits hold whole numbers in int8, so that products
    with codes can be taken in integers; finer and learned codebooks hold floats.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.Scalar(jnp.array([-1.0, 1.0]), jnp.float32(1), dim=4)
      >>> q.decode(q.encode(jnp.array([0.3, -2.0, 5.0, -0.1]))).tolist()
      [1.0, -1.0, 1.0, -1.0]
    """

    levels: Shaped[Array | np.ndarray, "k"]
    """Ascending, k = 2**bits; int8 or a float dtype."""
    step: Float[Array | np.ndarray, ""]
    dim: int = static(kw_only=True)
    symmetric: bool = static(default=False, kw_only=True)
    """True if `levels[::-1] == -levels`, which halves the comparisons."""

    def __post_init__(self):
        size = self.levels.shape[-1]
        if size < 2 or size & (size - 1):
            raise ValueError(f"expected a power of two of levels, got {size}")

    @property
    def bits(self) -> int:
        return (self.levels.shape[-1] - 1).bit_length()

    @property
    def values(self) -> Float[Array, "k"]:
        """The levels in the units of the vectors."""
        return jnp.asarray(self.levels) * self.step

    def encode(self, x: Vectors, scale: Float[Array, "*n 1"] | None = None) -> UInt32[Array, "*n words"]:
        """`Quantizer.encode`, of `x / scale` if a scale of each vector is given."""
        indices = [
            nearest(plane, self.values, scale, symmetric=self.symmetric) for plane in planes(check_vectors(x, self.dim))
        ]
        return packing.pack_planes(indices, self.bits)

    def encode_direction(self, x: Shaped[Array, "*n d"], norm: Float[Array, "*n 1"]) -> UInt32[Array, "*n words"]:
        return self.encode(x, norm)  # levels are scaled, and nothing is divided

    def indices(self, codes: UInt32[Array, "*n words"]) -> UInt32[Array, "*n d"]:
        """Index of the level of each coordinate."""
        return packing.unpack(codes, self.bits, self.dim)

    def decode(self, codes: UInt32[Array, "*n words"]) -> Float[Array, "*n d"]:
        return self.values[self.indices(codes)]

    @property
    def in_integers(self) -> bool:
        return self.levels.dtype == jnp.int8 and self.bits <= 4

    @property
    def factor(self) -> Float[Array | np.ndarray, ""]:
        return self.step

    def whole(self, indices: Integer[Array, "..."]) -> Int8[Array, "..."]:
        return look_up(indices, jnp.asarray(self.levels), symmetric=self.symmetric)

    def products(self, y: integers.Limbs, codes: Codes) -> Float[Array, "b h r t"]:
        """Inner products with whole levels. If bytes hold whole indices, words are unpacked in the order in which these
        lie in their bytes. Else a look-up of 32 bits is as fast as selections."""
        if isinstance(codes, KeyTile | ValueTile):
            return super().products(y, codes)
        order = packing.octet_order(self.dim, self.bits)
        if order is None:
            return integers.products(y, jnp.asarray(self.levels)[self.indices(codes)])
        y = (y[0][..., order], y[1]) if isinstance(y, tuple) else y[..., order]
        return integers.products(y, self.whole(packing.unpack_octets(codes, self.bits)))

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        return leaf(x, self.values[:, None])


def lloyd_max(dim: int, bits: int, *, sphere_dim: int | None = None) -> Scalar:
    """The Lloyd-Max quantizer for the coordinates of a random unit vector (TurboQuant, section 3.1), 1 to 8 bits.

    Args:
      dim: the number of coordinates to quantize.
      bits: bits a coordinate.
      sphere_dim: the dimension of the unit vector, `dim` unless the coordinates are a part of it.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.lloyd_max(dim=64, bits=3)
      Scalar(3 bits)
    """
    sphere_dim = dim if sphere_dim is None else sphere_dim
    bits = check_int("bits", bits, 1, codebooks.MAX_BITS)
    if bits <= 4:
        step, levels = codebooks.integer(sphere_dim, bits)
        return Scalar(jnp.asarray(levels), jnp.float32(step), dim=dim, symmetric=True)
    levels = jnp.asarray(codebooks.beta(sphere_dim, bits), jnp.float32)
    return Scalar(levels, jnp.float32(1), dim=dim, symmetric=True)
