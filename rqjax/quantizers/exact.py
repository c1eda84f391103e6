"""The quantizer that does not quantize: full-precision layers, and the yardstick of every table."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rqjax.arrays import blocks
from rqjax.arrays.planes import as_float32
from rqjax.core import Queries, Vectors, check_vectors, pytree, static


@pytree
class Exact:
    """Stores vectors as they are, rounded to `dtype`. Codes: (*n, d) of that dtype."""

    dim: int = static()
    dtype: str = static(default="bfloat16")

    @property
    def bits_per_vector(self) -> int:
        return 8 * jnp.dtype(self.dtype).itemsize * self.dim

    def encode(self, x: Vectors) -> Float[Array, "*n d"]:
        return check_vectors(x, self.dim).astype(self.dtype)

    def decode(self, codes: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return as_float32(codes)

    def dot(self, y: Queries, codes: Float[Array, "*n d"]) -> Float[Array, "*mn"]:
        return blocks.inner(check_vectors(y, self.dim), as_float32(codes))
