"""Scales along time: a coordinate's numbers in a tile of tokens are quantized as a vector."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rqjax.core import Codes, Quantizer, Vectors, check_vectors, pytree, static


@pytree
class PerChannel(Quantizer):
    """Quantizes tiles of `inner.dim` tokens, coordinate by coordinate. Codes: those of `inner`, (*n, tiles, d) of them.

    Keys have channels that are loud in all tokens; here their scales are their own (KIVI, Liu et al., 2024,
    arXiv:2402.02750; KVQuant, Hooper et al., 2024, arXiv:2401.18079).

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.PerChannel(rqjax.MinMax(dim=32, bits=2, group_size=32), dim=64)
      >>> (q.decode(q.encode(jnp.ones((128, 64)))).shape, q.bits_per_vector)
      ((128, 64), 192)
    """

    inner: Quantizer
    dim: int = static(kw_only=True)

    @property
    def tile(self) -> int:
        return self.inner.dim

    def encode(self, x: Vectors) -> Codes:
        tiles = tiles_of(check_vectors(x, self.dim), self.tile)
        return self.inner.encode(jnp.swapaxes(tiles, -2, -1))

    def decode(self, codes: Codes) -> Float[Array, "*n t d"]:
        tiles = jnp.swapaxes(self.inner.decode(codes), -2, -1)
        return tiles.reshape(*tiles.shape[:-3], tiles.shape[-3] * self.tile, self.dim)


def tiles_of(x: Shaped[Array, "*n t d"], tile: int) -> Shaped[Array, "*n tiles tile d"]:
    """Cuts vectors into tiles of tokens, which share scales. A vector that is not finite counts as zeros.

    Raises:
      ValueError: they are not whole tiles.
    """
    if x.ndim < 2 or x.shape[-2] % tile:
        raise ValueError(f"expected vectors (..., a multiple of {tile} tokens, {x.shape[-1]}), got shape {x.shape}")
    x = jnp.where(jnp.isfinite(x).all(-1, keepdims=True), x, 0)
    return x.reshape(*x.shape[:-2], x.shape[-2] // tile, tile, x.shape[-1])
