"""Number formats that share a scale among a block of coordinates: those of llama.cpp, of OCP and of NVIDIA.

Sources: ggml-org/llama.cpp, `ggml-quants.c` (q4_0, q8_0); Rouhani et al., 2023, arXiv:2310.10537, and OCP Microscaling
Formats v1.0 (MXFP4); NVIDIA, 2025, Pretraining large language models with NVFP4, arXiv:2509.25149.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8, Integer, Shaped, UInt8, UInt32

from rqjax.arrays import packing
from rqjax.arrays.levels import divide, look_up
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Vectors, check_int, check_vectors, pytree, static, unknown_name
from rqjax.core.products import rounded_to
from rqjax.scoring.levels import GroupedLevels

E4M3 = jnp.float8_e4m3fn


class Format(NamedTuple):
    """Number format: the scale of a block, and the index of each coordinate."""

    bits: int
    size: int
    levels: np.ndarray
    """Levels by index, whole numbers in int8."""
    unit: float
    """Factor of the levels."""
    stored: Callable[[Float[Array, "*n"]], Shaped[Array, "*n"]]
    """Maps the coordinate of largest magnitude to the scale of a block as it is stored."""
    scale: Callable[[Shaped[Array, "*n"]], Float[Array, "*n"]]
    """Maps stored scales to scales."""
    divisor: Callable[[Float[Array, "*n"]], Float[Array, "*n"]]
    """Maps the coordinate of largest magnitude to the divisor of coordinates; llama.cpp's is the scale before
    rounding."""
    nearest: Callable[[Float[Array, "*n"]], Float[Array, "*n"]]
    """Maps a coordinate over the divisor to its index."""


def _e2m1(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Index of the nearest number with a sign, two bits of exponent and one of mantissa; ties go to the even one."""
    size = jnp.minimum(jnp.abs(x), 6)
    large = jnp.where(size < 4, jnp.round(size) + 2, jnp.round(size / 2) + 4)
    return jnp.where(size < 2, jnp.round(2 * size), large) + jnp.where(jnp.signbit(x), 8, 0)


def _e8m0(extreme: Float[Array, "*n"]) -> UInt8[Array, "*n"]:
    """Power of two that takes the largest magnitude into 4 to 8, as its exponent plus 127."""
    exponent = jnp.frexp(jnp.abs(extreme))[1] - 1  # the logarithm, rounded down
    return jnp.where(extreme == 0, 0, jnp.clip(exponent - 2 + 127, 0, 254)).astype(jnp.uint8)


def _e4m3(extreme: Float[Array, "*n"]) -> UInt8[Array, "*n"]:
    size = jnp.minimum(divide(jnp.abs(extreme), 6), float(jnp.finfo(E4M3).max))
    return lax.bitcast_convert_type(rounded_to(size, E4M3), jnp.uint8)


def _power(stored: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.exp2(as_float32(stored) - 127)


def _of_e4m3(stored: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    return lax.bitcast_convert_type(stored, E4M3).astype(jnp.float32)


def _half(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return rounded_to(jnp.clip(x, -65504, 65504), jnp.float16)


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
FORMATS = {
    "q4_0": Format(
        bits=4,
        size=32,
        levels=np.arange(-8, 8, dtype=np.int8),
        unit=1,
        stored=lambda extreme: _half(extreme / -8),
        scale=as_float32,
        divisor=lambda extreme: extreme / -8,
        nearest=lambda x: jnp.clip(jnp.floor(x + 8.5), 0, 15),
    ),
    "q8_0": Format(
        bits=8,
        size=32,
        levels=np.arange(-128, 128, dtype=np.int8),
        unit=1,
        stored=lambda extreme: _half(divide(jnp.abs(extreme), 127)),
        scale=as_float32,
        divisor=lambda extreme: divide(jnp.abs(extreme), 127),
        nearest=lambda x: jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5) + 128,
    ),
    "mxfp4": Format(4, 32, _E2M1, 0.5, _e8m0, _power, lambda extreme: _power(_e8m0(extreme)), _e2m1),
    "nvfp4": Format(4, 16, _E2M1, 0.5, _e4m3, _of_e4m3, lambda extreme: _of_e4m3(_e4m3(extreme)), _e2m1),
}


@pytree
class Formats(GroupedLevels):
    """Blocks of consecutive coordinates in one of `FORMATS`. Codes: (words (*n, d bits / 32), scales (*n, blocks)).

    Codes decode to the numbers of llama.cpp, of the specification of MXFP4 and of MLX's NVFP4. A tensor has no scale of
    its own beside those of NVFP4's blocks, which reach from 2^-9 to 448.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> words, scales = rqjax.Formats(dim=64, format="nvfp4").encode(jnp.ones((5, 64)))
      >>> (words.shape, scales.shape)
      ((5, 8), (5, 4))
    """

    dim: int = static()
    format: str = static()

    def __post_init__(self):
        check_int("dim in Formats(dim, format)", self.dim, 1, 2**24)
        if self.format not in FORMATS:
            raise unknown_name("format", self.format, FORMATS)
        if self.dim % self.size:
            raise ValueError(f"expected dim to be a multiple of {self.format}'s blocks of {self.size}, got {self.dim}")

    @property
    def bits(self) -> int:
        return FORMATS[self.format].bits

    @property
    def size(self) -> int:
        """Coordinates in a block."""
        return FORMATS[self.format].size

    def encode(self, x: Vectors) -> Codes:
        x, form = as_float32(check_vectors(x, self.dim)), FORMATS[self.format]
        blocks = x.reshape(*x.shape[:-1], self.dim // self.size, self.size)
        place = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
        extreme = jnp.take_along_axis(blocks, place, axis=-1)
        divisor = form.divisor(extreme)
        index = form.nearest(jnp.where(divisor == 0, 0, divide(blocks, jnp.where(divisor == 0, 1, divisor))))
        words = packing.pack_stream(index.astype(jnp.uint32).reshape(x.shape), self.bits)
        return words, form.stored(extreme[..., 0])

    def indices(self, codes: Codes) -> UInt32[Array, "*n d"]:
        """Index of each coordinate's level."""
        return packing.unpack_stream(codes[0], self.bits, self.dim)

    @property
    def groups(self) -> int:
        return self.dim // self.size

    def whole(self, indices: Integer[Array, "..."]) -> Int8[Array, "..."]:
        return look_up(indices, jnp.asarray(FORMATS[self.format].levels))

    def grid(self, *numbers: Array) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
        form = FORMATS[self.format]
        return form.scale(numbers[0]) * form.unit, None

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        levels = jnp.asarray(FORMATS[self.format].levels)[self.indices(codes)].astype(jnp.float32)
        return levels * jnp.repeat(self.grid(codes[1])[0], self.size, axis=-1)
