"""Norms and directions of vectors, of huge and of tiny ones too, and how norms are stored."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from rqjax.arrays.planes import as_float32
from rqjax.core import platforms

TINY, HUGE = 1e-15, 1e19
"""Norms between these have squares, and sums of squares, that float32 holds with full precision."""
LEAST = 1e-20
"""What is added to squares that are divided by."""
PER_OCTAVE = 8
"""Norms of eight bits an octave: 9 % apart, so that what is left of a norm's spread is 2.5 %; 256 are 32 octaves."""
LOGARITHMIC = "uint8"
"""The dtype of norms of eight bits."""


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


def stored(norm: Float[Array, "*n"], dtype: str) -> Shaped[Array, "*n"]:
    """Norms as they are stored; eight bits hold those from 2^-16 to 2^16, on a logarithmic scale, whose least one
    stands for 0."""
    return of_octaves(jnp.log2(norm)) if dtype == LOGARITHMIC else norm.astype(dtype)


def restored(x: Shaped[Array, "*n"]) -> Float[Array, "*n"]:
    """Norms that were stored; 0 is the power of -inf, since a selection after it would be repeated by all that reads
    them."""
    if x.dtype == LOGARITHMIC:
        return jnp.exp2(jnp.where(x > 0, octaves(x), -jnp.inf))
    return as_float32(x)


def largest(dtype: str) -> float:
    """Of stored norms."""
    return float(jnp.finfo(jnp.float32 if dtype == LOGARITHMIC else dtype).max)


def of_octaves(x: Float[Array, "*n"]) -> UInt8[Array, "*n"]:
    """The nearest of the norms of eight bits."""
    return jnp.clip(jnp.round(PER_OCTAVE * x + 128), 0, 255).astype(jnp.uint8)


def octaves(x: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """The logarithms of norms of eight bits, to the base of 2."""
    return (as_float32(x) - 128) / PER_OCTAVE
