"""Losses that `learning.fit` minimizes: pytrees called with a quantizer, a batch and the progress (0 to 1).

Codes are held fixed: gradients go through the levels and the rotation that decode them ("straight-through levels").
For the squared error that is no approximation. Encoding takes the codes of least error, so by the envelope theorem the
derivative of min over codes of |x - decode(codes)|^2 is that of decoding alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from rqjax.arrays.planes import as_float32
from rqjax.core import Quantizer, pytree
from rqjax.core.quantizer import straight_through

TINY = 1e-20


def _with_hard_codes(loss: Any, quantizer: Quantizer, batch: PyTree, progress: ArrayLike = 1.0) -> Float[Array, ""]:
    return loss.error(batch, straight_through(quantizer, as_float32(_vectors(batch))))


@pytree
class Distortion:
    """Squared error of each vector relative to its own square, as `metrics.relative_mse` measures it."""

    def error(self, x: Float[Array, "n d"], decoded: Float[Array, "n d"]) -> Float[Array, ""]:
        x = as_float32(x)
        return jnp.mean(jnp.sum((x - decoded) ** 2, axis=-1) / (jnp.sum(x**2, axis=-1) + TINY))

    __call__ = _with_hard_codes


@pytree
class CodingGain:
    """Geometric over arithmetic mean of the rotated coordinates' variances. With bits given where they are needed, the
    error is proportional to it (transform coding gain: Jayant & Noll, 1984)."""

    def __call__(self, quantizer: Quantizer, x: Float[Array, "n d"], progress: ArrayLike = 1.0) -> Float[Array, ""]:
        """Measures the coordinates that reach the levels.

        Raises:
          TypeError: `quantizer` is not a nest of norms, gains, means and rotations around a Scalar or PerCoordinate.
        """
        variances: list[Array] = []

        def leaf(y: Array, levels: Array) -> Array:
            variances.append(y.var(axis=0))
            return y

        quantizer.relaxed(as_float32(x), leaf)
        variance = jnp.concatenate(variances) + TINY
        return jnp.exp(jnp.log(variance).mean() - jnp.log(variance.mean()))


@pytree
class ScoreError:
    """Squared error of the scores of keys, mean over queries, relative to that of the mean in place of each key. It is
    (k - k~)^T C (k - k~) with C = E q q^T."""

    covariance: Float[Array, "d d"]

    @classmethod
    def of(cls, queries: Float[Array, "m d"]) -> "ScoreError":
        q = as_float32(queries)
        return cls(jnp.matmul(q.T, q, precision=lax.Precision.HIGHEST) / len(q))

    def error(self, x: Float[Array, "n d"], decoded: Float[Array, "n d"]) -> Float[Array, ""]:
        x = as_float32(x)

        def form(e: Array) -> Array:
            return jnp.sum(jnp.matmul(e, self.covariance, precision=lax.Precision.HIGHEST) * e)

        return form(x - decoded) / (form(x - x.mean(axis=0)) + TINY)

    __call__ = _with_hard_codes


@pytree
class OutputError:
    """Squared error of attention's output relative to the output's size, if the errors of values are independent. The
    batch is (values (n, d), weights (n,)). A token's weight is the sum over queries of its squared attention weight."""

    def error(self, batch: PyTree, decoded: Float[Array, "n d"]) -> Float[Array, ""]:
        x, weights = as_float32(batch[0]), batch[1]
        error = jnp.sum((x - decoded) ** 2, axis=-1)
        return jnp.sum(weights * error) / (jnp.sum(weights * jnp.sum(x**2, axis=-1)) + TINY)

    __call__ = _with_hard_codes


def _vectors(batch: PyTree) -> Float[Array, "n d"]:
    """Returns the vectors of a batch, which come first."""
    return jax.tree.leaves(batch)[0]
