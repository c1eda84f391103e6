"""One bit a coordinate and a norm: the quantized Johnson-Lindenstrauss transform."""

import math

import jax.numpy as jnp

from rqjax.core import Key, platforms, random
from rqjax.quantizers.combinators import Normalized, Rotated
from rqjax.quantizers.scalar import Scalar
from rqjax.rotations import Dense, Hadamard, Rotation


class Sign:
    """|x| and sign(S x), which decode to gain |x| S^T sign(S x): `Normalized(Rotated(S, Scalar))` of the levels -1, 1.

    The inner product of that with y is an unbiased estimate of <x, y>, whose variance is at most pi / (2 d) |x|^2 |y|^2
    for the Gaussian sketch. Source: QJL (Zandieh et al., 2024), Definition 1 and Lemma 4 of TurboQuant.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Sign.orthogonal(jax.random.key(0), 64)
      Normalized(Rotated(Dense(64), Scalar(1 bits)))
    """

    def __new__(cls, sketch: Rotation, gain: float, *, dtype: str = "bfloat16") -> Normalized:
        """Makes the quantizer of `sketch`, which is S over sqrt(d), with the norm in `dtype`."""
        levels = jnp.array([-1, 1], jnp.int8)
        return Normalized(Rotated(sketch, Scalar(levels, jnp.float32(gain), dim=sketch.dim)), dtype=dtype)

    @staticmethod
    @platforms.made_on_host
    def gaussian(key: Key, dim: int) -> Normalized:
        """The paper's sketch: independent standard normal entries."""
        matrix = random.normal(key, (dim, dim)) / math.sqrt(dim)
        return Sign(Dense(matrix), math.sqrt(math.pi / 2 / dim))

    @staticmethod
    def orthogonal(key: Key, dim: int) -> Normalized:
        """A uniform orthogonal sketch, whose signs repeat less: about 40 % less error at the same bits."""
        return Sign(Dense.haar(key, dim), _sphere_gain(dim))

    @staticmethod
    def hadamard(key: Key, dim: int) -> Normalized:
        """A randomized Hadamard sketch: d log d operations; unbiased as far as x has no structure of its own."""
        return Sign(Hadamard.random(key, dim), _sphere_gain(dim))


def _sphere_gain(dim: int) -> float:
    """Gain 1 / (d E|u_1|) for u uniform on the sphere: E|u_1| = Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))."""
    log_mean = math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2) - math.log(math.pi) / 2
    return math.exp(-log_mean) / dim
