"""The quantizer that does not quantize: full-precision layers, and the yardstick of every table."""

from typing import Any

from jaxtyping import Array, Float

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, check_int, check_vectors, pytree, static
from rqjax.core.products import full_precision_einsum, rounded_to, weighted_sums


@pytree
class Exact(Quantizer):
    """Stores vectors as they are, rounded to `dtype`. Codes: (*n, d) of that dtype; of 8 bits within its range.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Exact(dim=4, dtype="float16").encode(jnp.ones((2, 4))).dtype
      dtype('float16')
    """

    dim: int = static()
    dtype: str = static(default="bfloat16")

    def __post_init__(self):
        check_int("dim in Exact(dim, dtype)", self.dim, 1, 2**24)

    def encode(self, x: Vectors) -> Float[Array, "*n d"]:
        return rounded_to(check_vectors(x, self.dim), self.dtype)

    def decode(self, codes: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        return as_float32(codes)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return full_precision_einsum("bhrd,bhtd->bhrt", prepared, codes)

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return weighted_sums(w, codes)

    @property
    def width(self) -> int:
        """Width 0 of float32, which is multiplied where it lies, in one block if that holds the scores. Other dtypes
        have 8: the bits of bfloat16 become bfloat16 by a copy, which is to stay in the processor's cache."""
        return 0 if self.dtype == "float32" else 8
