"""What `learning.fit` minimizes: pytrees that are called with a quantizer, a batch and how far it is (0 to 1).

Codes are held fixed: gradients go through the levels and the rotation that decode them ("straight-through levels").
For the squared error that is no approximation. Encoding takes the codes of least error, so by the envelope theorem the
derivative of min over codes of |x - decode(codes)|^2 is that of decoding alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtr
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from rqjax.arrays.planes import as_float32
from rqjax.core import Quantizer, pytree, static
from rqjax.core.quantizer import straight_through

TINY = 1e-20


def _with_hard_codes(loss: Any, quantizer: Quantizer, batch: PyTree, progress: ArrayLike = 1.0) -> Float[Array, ""]:
    return loss.error(batch, straight_through(quantizer, as_float32(_vectors(batch))))


@pytree
class Distortion:
    """Relative squared error, of each vector its own: what `metrics.relative_mse` measures."""

    def error(self, x: Float[Array, "n d"], decoded: Float[Array, "n d"]) -> Float[Array, ""]:
        x = as_float32(x)
        return jnp.mean(jnp.sum((x - decoded) ** 2, axis=-1) / (jnp.sum(x**2, axis=-1) + TINY))

    __call__ = _with_hard_codes


@pytree
class Soft:
    """A loss of decoded vectors with soft codes: each coordinate decodes to a mean of the levels with the weights
    exp(-(x - level)^2 / (2 t^2 s^2)), where s^2 is the mean squared distance of neighboring levels.

    The temperature t falls geometrically from `start` to `stop` (soft-to-hard annealing: Agustsson et al., 2017).
    Losses that encoding does not minimize jump where codes change; only soft codes let their gradients see it.
    """

    loss: Any
    """`Distortion`, `ScoreError`, `SoftmaxKL` or `OutputError`."""
    start: float = static(default=0.5, kw_only=True)
    stop: float = static(default=0.05, kw_only=True)

    def __call__(self, quantizer: Quantizer, batch: PyTree, progress: ArrayLike = 1.0) -> Float[Array, ""]:
        temperature = self.start * (self.stop / self.start) ** progress
        soft = functools.partial(_soft_levels, temperature=temperature)
        return self.loss.error(batch, quantizer.relaxed(as_float32(_vectors(batch)), soft))


@pytree
class GaussianDistortion:
    """The error of the levels if each rotated coordinate were Gaussian with the batch's mean and variance, in closed
    form: smooth, and blind to everything but second moments."""

    def __call__(self, quantizer: Quantizer, x: Float[Array, "n d"], progress: ArrayLike = 1.0) -> Float[Array, ""]:
        parts = [(y.mean(axis=0), y.var(axis=0), levels) for y, levels in reached(quantizer, x)]
        energy = sum(jnp.sum(mean**2 + variance) for mean, variance, _ in parts)
        return sum((jnp.sum(_gaussian_error(*part)) for part in parts), jnp.zeros(())) / energy


@pytree
class CodingGain:
    """The geometric over the arithmetic mean of the rotated coordinates' variances: with bits given where they are
    needed, the error is proportional to it (transform coding gain: Jayant & Noll, 1984)."""

    def __call__(self, quantizer: Quantizer, x: Float[Array, "n d"], progress: ArrayLike = 1.0) -> Float[Array, ""]:
        variance = jnp.concatenate([y.var(axis=0) for y, _ in reached(quantizer, x)]) + TINY
        return jnp.exp(jnp.log(variance).mean() - jnp.log(variance.mean()))


@pytree
class ScoreError:
    """Squared error of the scores of keys, mean over queries: (k - k~)^T C (k - k~) with C = E q q^T, relative to that
    of no key at all."""

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
class SoftmaxKL:
    """KL divergence (nats) of the softmax over the keys of a batch, mean over the model's own queries."""

    queries: Float[Array, "m d"]
    scale: float = static(kw_only=True)
    """Of the scores, 1 / sqrt(d) as a rule."""

    def error(self, x: Float[Array, "n d"], decoded: Float[Array, "n d"]) -> Float[Array, ""]:
        def logs(keys):
            scores = jnp.matmul(self.queries, keys.T, precision=lax.Precision.HIGHEST)
            return jax.nn.log_softmax(self.scale * scores)

        exact, coded = logs(as_float32(x)), logs(decoded)
        return jnp.mean(jnp.sum(jnp.exp(exact) * (exact - coded), axis=-1))

    __call__ = _with_hard_codes


@pytree
class OutputError:
    """Squared error of attention's output relative to the output's size if the errors of values are independent: the
    batch is (values (n, d), weights (n,)), a token's weight the sum over queries of its squared attention weight."""

    def error(self, batch: PyTree, decoded: Float[Array, "n d"]) -> Float[Array, ""]:
        x, weights = as_float32(batch[0]), batch[1]
        error = jnp.sum((x - decoded) ** 2, axis=-1)
        return jnp.sum(weights * error) / (jnp.sum(weights * jnp.sum(x**2, axis=-1)) + TINY)

    __call__ = _with_hard_codes


def _vectors(batch: PyTree) -> Float[Array, "n d"]:
    """The vectors of a batch, which come first."""
    return jax.tree.leaves(batch)[0]


def reached(
    quantizer: Quantizer, x: Float[Array, "n d"]
) -> list[tuple[Float[Array, "n size"], Float[Array, "k #size"]]]:
    """What reaches levels, as far as derivatives of rotations go, and the levels: of consecutive coordinates that have
    as many.

    Raises:
      TypeError: `quantizer` is not a nest of norms, gains, means and rotations around a Scalar or PerCoordinate.
    """
    found: list[Any] = []

    def leaf(x: Array, levels: Array) -> Array:
        found.append((x, levels))
        return x

    quantizer.relaxed(as_float32(x), leaf)
    return found


def _soft_levels(
    x: Float[Array, "*n m"], levels: Float[Array | np.ndarray, "k #m"], temperature: ArrayLike
) -> Float[Array, "*n m"]:
    if levels.shape[0] == 1:
        return jnp.broadcast_to(levels[0], x.shape)
    spacing = jnp.mean(jnp.diff(levels, axis=0) ** 2, axis=0)
    levels = levels.reshape(levels.shape[0], *[1] * (x.ndim - 1), -1)
    weights = jax.nn.softmax(-((x - levels) ** 2) / (2 * temperature**2 * spacing + TINY), axis=0)
    return jnp.sum(weights * levels, axis=0)


def _gaussian_error(mean: Array, variance: Array, levels: Float[Array | np.ndarray, "k #m"]) -> Float[Array, "m"]:
    """E (x - nearest level)^2 for x of N(mean, variance)."""
    deviation = jnp.sqrt(variance + TINY)
    z = ((levels[1:] + levels[:-1]) / 2 - mean) / deviation
    far = jnp.full((1, z.shape[-1]), 30.0)
    z = jnp.concatenate([-far, z, far])
    density = jnp.exp(-(z**2) / 2) / jnp.sqrt(2 * jnp.pi)
    mass, first, second = (jnp.diff(f, axis=0) for f in (ndtr(z), -density, ndtr(z) - z * density))
    offset = mean - levels  # (offset + deviation t)^2 over a cell, t standard normal
    return jnp.sum(offset**2 * mass + 2 * offset * deviation * first + variance * second, axis=0)
