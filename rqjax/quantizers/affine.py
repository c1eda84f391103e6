"""Round-to-nearest on an affine grid per group, in MLX's exact layout."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Integer, UInt32

from rqjax.arrays import packing
from rqjax.arrays.levels import divide
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, check_int, check_vectors, platforms, pytree, static
from rqjax.core.products import rounded_to
from rqjax.scoring.levels import GroupedLevels

MLX_BITS, MLX_GROUPS = (4, 8), (32, 64, 128)
"""Bits and group sizes that jax-mps 0.11 and MLX take."""


@pytree
class Affine(GroupedLevels):
    """Groups of consecutive coordinates as scale * index + bias. Plain round-to-nearest is one group.

    Codes: (words uint32 (*n, d bits / 32), scales (*n, groups), biases (*n, groups)). They are bit for bit those of
    `mx.quantize(x, group_size, bits)` for groups of 32, 64 and 128 and `dtype` that of x. The scale is that of the
    wider side: the extreme value of larger magnitude and zero are both on the grid.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> words, scales, biases = rqjax.Affine(dim=64, bits=4, group_size=32).encode(jnp.ones((5, 64)))
      >>> (words.shape, scales.shape)
      ((5, 8), (5, 2))
    """

    dim: int = static()
    bits: int = static()
    group_size: int = static(kw_only=True)
    dtype: str = static(default="bfloat16", kw_only=True)
    """Dtype of the scales and biases."""

    def __post_init__(self):
        check_int(f"bits in {type(self).__name__}(dim, bits, group_size=)", self.bits, 1, 8)
        if self.group_size < 1 or self.dim % self.group_size:
            raise ValueError(f"expected a group size that divides dim = {self.dim}, got {self.group_size}")

    @property
    def keeps_words(self) -> bool:
        """True if MLX's kernels multiply by the codes as they are, so that a cache on their platform keeps them so."""
        return platforms.platform() == "mps" and self.bits in MLX_BITS and self.group_size in MLX_GROUPS

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        groups = x.reshape(*x.shape[:-1], self.dim // self.group_size, self.group_size)
        steps = 2**self.bits - 1
        scale, bias = self._grid(groups.min(-1), groups.max(-1), steps)
        index = jnp.clip(jnp.round(divide(groups - bias[..., None], scale[..., None])), 0, steps)
        words = packing.pack_stream(index.astype(jnp.uint32).reshape(x.shape), self.bits)
        return words, rounded_to(scale, self.dtype), rounded_to(bias, self.dtype)

    def indices(self, codes: Codes) -> UInt32[Array, "*n d"]:
        """The place of each coordinate on its group's grid."""
        return packing.unpack_stream(codes[0], self.bits, self.dim)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        groups = self._grouped(codes) * as_float32(codes[1])[..., None] + as_float32(codes[2])[..., None]
        return groups.reshape(*groups.shape[:-2], self.dim)

    @property
    def groups(self) -> int:
        return self.dim // self.group_size

    def whole(self, indices: Integer[Array, "..."]) -> Int8[Array, "..."]:
        """Centered indices in int8, so that 8 bits fit and scale and bias do not cancel."""
        return lax.bitcast_convert_type(indices - jnp.uint8(2 ** (self.bits - 1)), jnp.int8)

    def grid(self, *numbers: Array) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
        scale, bias = map(as_float32, numbers)
        return scale, bias + 2 ** (self.bits - 1) * scale

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        return (Quantizer if self.keeps_words else GroupedLevels).laid_out(self, codes, transposed)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return (Quantizer if self.keeps_words else GroupedLevels).prepare(self, y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return (Quantizer if self.keeps_words else GroupedLevels).scores(self, prepared, codes)

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return (Quantizer if self.keeps_words else GroupedLevels).weigh(self, w, codes)

    @property
    def width(self) -> int:
        return 4 if self.keeps_words else 1

    def _grid(self, low: Float[Array, "*n"], high: Float[Array, "*n"], steps: int) -> tuple[Array, Array]:
        """Scale and bias of groups."""
        scale = jnp.maximum(divide(high - low, steps), 1e-7)
        low_is_wider = jnp.abs(low) > jnp.abs(high)
        scale, edge = jnp.where(low_is_wider, scale, -scale), jnp.where(low_is_wider, low, high)
        whole = jnp.round(edge / scale)
        scale = jnp.where(whole != 0, edge / jnp.where(whole != 0, whole, 1), scale)
        return scale, jnp.where(whole != 0, edge, 0)

    def _grouped(self, codes: Codes) -> Float[Array, "*n g k"]:
        index = self.indices(codes).astype(jnp.float32)
        return index.reshape(*index.shape[:-1], self.dim // self.group_size, self.group_size)


@pytree
class MinMax(Affine):
    """`Affine` with both the least and the largest coordinate of a group on its grid, zero or not. KIVI and others call
    it asymmetric round-to-nearest.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.MinMax(dim=4, bits=1, group_size=4)
      >>> q.decode(q.encode(jnp.array([1.0, 3.0, 1.5, 2.5]))).tolist()
      [1.0, 3.0, 1.0, 3.0]
    """

    def _grid(self, low: Float[Array, "*n"], high: Float[Array, "*n"], steps: int) -> tuple[Array, Array]:
        return jnp.maximum(divide(high - low, steps), 1e-7), low
