"""A linear map before a quantizer, so that its least error is in another metric."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, Wrapper, check_fits, check_vectors, pytree


@pytree
class Linear(Wrapper):
    """Quantizes M x for an invertible M: the error is least in the metric M^T M. Codes: those of `inner`.

    Queries are multiplied once by the inverse's transpose, and sums once by the inverse; vectors never.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> loud = jnp.diag(jnp.where(jnp.arange(64) < 8, 4.0, 1.0))
      >>> rqjax.Linear(loud, jnp.linalg.inv(loud), rqjax.eden(jax.random.key(0), 64, 3)).bits_per_vector
      208
    """

    matrix: Float[Array, "d d"]
    inverse: Float[Array, "d d"]
    inner: Quantizer

    def __post_init__(self):
        check_fits(matrix=self.matrix, inverse=self.inverse, inner=self.inner.dim)

    def encode(self, x: Vectors) -> Codes:
        return self.inner.encode(_times(as_float32(check_vectors(x, self.dim)), self.matrix.T))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return _times(self.inner.decode(codes), self.inverse.T)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return self.inner.prepare(_times(y, self.inverse))  # <y, M^-1 z> = <M^-T y, z>

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return _times(self.inner.restore(sums), self.inverse.T)

    def relaxed(self, x: Float[Array, "*n d"], leaf: Any) -> Float[Array, "*n d"]:
        return _times(self.inner.relaxed(_times(x, self.matrix.T), leaf), self.inverse.T)


def _times(x: Float[Array, "*n d"], matrix: Float[Array, "d d"]) -> Float[Array, "*n d"]:
    return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)
