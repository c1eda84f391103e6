"""Norms and directions of vectors, of huge and of tiny ones too."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.core import platforms

TINY, HUGE = 1e-15, 1e19
"""Norms between these have squares, and sums of squares, that float32 holds with full precision."""


def norm(x: Shaped[Array, "*n d"]) -> Float[Array, "*n 1"]:
    """Euclidean norms of vectors, right wherever the norm itself is a normal number."""

    def size(x, scale):
        return jnp.sqrt(jnp.sum((as_float32(x) * scale) ** 2, axis=-1, keepdims=True)) / scale

    def rescaled(x):
        return size(x, _unit(usual))

    # The squares of huge and of tiny numbers leave float32. Such vectors are rare; on a CPU the others are read only
    # once. Elsewhere a condition would make the device wait for the host.
    usual = size(x, 1)
    if not platforms.on_cpu():
        return rescaled(x)
    return lax.cond(jnp.all((usual > TINY) & (usual < HUGE)), lambda x: usual, rescaled, x)


def _unit(norm: Float[Array, "*n 1"]) -> Float[Array, "*n 1"]:
    """A power of two that makes huge and tiny norms usual ones; 1 for the others."""
    return jnp.where(norm >= HUGE, 2.0**-80, jnp.where(norm <= TINY, 2.0**80, jnp.ones_like(norm)))


def direction(x: Shaped[Array, "*n d"], size: Float[Array, "*n 1"] | None = None) -> Float[Array, "*n d"]:
    """Vectors over their norms, or over `size`, 0 where that is 0.

    XLA divides by a number of each row by multiplying with its reciprocal, which above 8.5e37 is subnormal, and those
    are zero on a CPU: hence the units.
    """
    size = norm(x) if size is None else size
    unit = _unit(size)
    return as_float32(x) * unit / jnp.where(size > 0, size * unit, 1)
