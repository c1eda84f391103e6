"""Norms and directions of vectors, of huge and of tiny ones too, and how norms are stored."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from rqjax.arrays.planes import as_float32
from rqjax.core import platforms
from rqjax.core.products import HUGE, TINY, over, rounded_to, unit

LEAST = 1e-20
"""Number added to squares before dividing by them."""
PER_OCTAVE = 8
"""Levels per octave of eight-bit norms. They are 9 % apart, so that rounding leaves a spread of 2.5 %; 256 of them are
32 octaves."""
LOGARITHMIC = "uint8"
"""Dtype of eight-bit norms."""


def norm(x: Shaped[Array, "*n d"]) -> Float[Array, "*n 1"]:
    """Euclidean norms of vectors, right wherever the norm itself is a normal number."""

    # The squares of huge and of tiny numbers leave float32. Such vectors are rare; on a CPU the others are read only
    # once. Elsewhere a condition would make the device wait for the host.
    usual = _size(x, 1)
    if not platforms.on_cpu():
        return _rescaled(x, usual)
    return lax.cond(jnp.all((usual > TINY) & (usual < HUGE)), _as_it_is, _rescaled, x, usual)


def _size(x: Shaped[Array, "*n d"], scale: Float[Array, "*n 1"] | int) -> Float[Array, "*n 1"]:
    return jnp.sqrt(jnp.sum((as_float32(x) * scale) ** 2, axis=-1, keepdims=True)) / scale


# Branches of a condition outside jit are compiled once only if they are functions of a module and close over nothing.
def _as_it_is(x: Shaped[Array, "*n d"], usual: Float[Array, "*n 1"]) -> Float[Array, "*n 1"]:
    return usual


def _rescaled(x: Shaped[Array, "*n d"], usual: Float[Array, "*n 1"]) -> Float[Array, "*n 1"]:
    return _size(x, unit(usual))


def direction(x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Vectors over their norms; 0 where the norm is 0."""
    return over(x, norm(x))


def stored(norm: Float[Array, "*n"], dtype: str) -> Shaped[Array, "*n"]:
    """Norms as they are stored, the largest number in the place of larger ones. Eight bits hold those from 2^-16 to
    2^16 on a logarithmic scale; code 0 stands for 0."""
    if dtype == LOGARITHMIC:
        return of_octaves(jnp.log2(norm))
    return rounded_to(jnp.where((norm > (most := largest(dtype))) & (norm < jnp.inf), most, norm), dtype)


def restored(x: Shaped[Array, "*n"]) -> Float[Array, "*n"]:
    """Norms decoded from storage. Code 0 decodes as 2**-inf = 0. A `where` after the power would be recomputed by every
    consumer."""
    if x.dtype == LOGARITHMIC:
        return jnp.exp2(jnp.where(x > 0, octaves(x), -jnp.inf))
    return as_float32(x)


def check_dtype(dtype: str) -> None:
    if dtype != LOGARITHMIC and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"expected norms of dtype 'uint8' or one of floating point, got {dtype!r}")


def largest(dtype: str) -> float:
    """Largest norm that `dtype` stores."""
    return float(jnp.finfo(jnp.float32 if dtype == LOGARITHMIC else dtype).max)


def of_octaves(x: Float[Array, "*n"]) -> UInt8[Array, "*n"]:
    """Eight-bit codes of the norms nearest to 2**x."""
    return jnp.clip(jnp.round(PER_OCTAVE * x + 128), 0, 255).astype(jnp.uint8)


def octaves(x: UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """Logarithms of eight-bit norms to base 2."""
    return (as_float32(x) - 128) / PER_OCTAVE
