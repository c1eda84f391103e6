"""Clipping of coordinates of large magnitude before a grid is laid over them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, Wrapper, check_vectors, pytree, static


@pytree
class Clipped(Wrapper):
    """Clips each vector's coordinates to the magnitude that a share of them does not pass. Codes: those of `inner`.

    The threshold is the coordinate of rank `share` d by magnitude, counted from 0 (OSCAR: Zhou et al., 2026,
    arXiv:2605.17757).

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.Clipped(rqjax.MinMax(dim=4, bits=1, group_size=4), share=0.5)
      >>> q.decode(q.encode(jnp.array([-1.0, 9.0, 2.0, -0.5]))).tolist()
      [-1.0, 2.0, 2.0, -1.0]
    """

    inner: Quantizer
    share: float = static(kw_only=True)

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"expected a share from 0 to 1, got {self.share}")

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        above = max(1, self.dim - int(self.share * self.dim))
        limit = lax.top_k(jnp.abs(x), above)[0][..., -1:]
        return self.inner.encode(jnp.clip(x, -limit, limit))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return self.inner.decode(codes)
