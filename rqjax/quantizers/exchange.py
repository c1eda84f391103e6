"""Element exchange: neighbors are ordered by size before they are quantized (QET, section 3.2)."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rqjax.arrays import packing
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, check_int, check_vectors, pytree, static


@pytree
class Exchange(Quantizer):
    """Sends the smaller of two neighbors to the first half and the larger to the second, `levels` times over, each
    half on its own. Codes: (maps uint8 (*n, bytes), inner codes).

    The 2**levels leaves have a smaller spread than x: one level multiplies a Gaussian's variance by 1 - 1 / pi within
    leaves (QET, Theorem 2). A map has one bit for each pair, whether left < right. Every vector is ordered in its own
    way, so products decode.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Exchange(rqjax.Exact(8), levels=2).bits_per_vector  # 8 for the pairs of two levels
      136
    """

    inner: Quantizer
    levels: int = static(kw_only=True)

    def __post_init__(self):
        check_int("levels", self.levels, 0, 16)
        if self.inner.tile > 1:
            raise ValueError(f"expected a quantizer of each vector alone, got one of tiles of {self.inner.tile}")
        _check_levels(self.inner.dim, self.levels)

    @property
    def heads(self) -> int | None:
        return self.inner.heads

    @property
    def dim(self) -> int:
        return self.inner.dim

    def encode(self, x: Vectors) -> Codes:
        y, maps = exchange(as_float32(check_vectors(x, self.dim)), self.levels)
        bits = jnp.concatenate([x[..., :0].astype(bool), *maps], axis=-1)
        return packing.pack_bytes(bits.astype(jnp.uint32), 1), self.inner.encode(y)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        bits = packing.unpack_bytes(codes[0], 1, self._pairs) > 0
        maps = [bits[..., i : i + self.dim // 2] for i in range(0, self._pairs, max(1, self.dim // 2))]
        return exchange_back(self.inner.decode(codes[1]), maps)

    @property
    def _pairs(self) -> int:
        return self.levels * self.dim // 2


def exchange(x: Float[Array, "*n d"], levels: int) -> tuple[Float[Array, "*n d"], list[Bool[Array, "*n half"]]]:
    """The leaves side by side, and a map of each level: whether left < right, so that equals do not move."""
    _check_levels(x.shape[-1], levels)
    maps, lead, half = [], x.shape[:-1], x.shape[-1] // 2
    for level in range(levels):
        pairs = x.reshape(*lead, 2**level, half >> level, 2)
        left, right = pairs[..., 0], pairs[..., 1]
        maps.append((left < right).reshape(*lead, half))
        x = jnp.stack([jnp.minimum(left, right), jnp.maximum(left, right)], axis=-2).reshape(x.shape)
    return x, maps


def exchange_back(y: Float[Array, "*n d"], maps: Sequence[Bool[Array, "*n half"]]) -> Float[Array, "*n d"]:
    """The inverse of `exchange`, if y is what it returned."""
    half = y.shape[-1] // 2

    def undo(y: Array, level: int) -> Array:
        halves = y.reshape(*y.shape[:-1], 2**level, 2, half >> level)
        less, more = halves[..., 0, :], halves[..., 1, :]
        left_first = maps[level].reshape(less.shape)
        pairs = jnp.stack([jnp.where(left_first, less, more), jnp.where(left_first, more, less)], axis=-1)
        return pairs.reshape(y.shape)

    return functools.reduce(undo, reversed(range(len(maps))), y)


def _check_levels(dim: int, levels: int) -> None:
    if dim % 2**levels:
        wanted = f"a dimension that 2^{levels} = {2**levels} divides for {levels} levels of exchange"
        raise ValueError(f"expected {wanted}, got {dim}")
