"""Products of queries with vectors and sums of vectors by weights, in full precision; numbers rounded to be stored."""

import contextlib
import functools
import operator
from collections.abc import Iterator
from contextvars import ContextVar

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Shaped

from rqjax.core import platforms
from rqjax.core.dispatch import CONTEXT

TINY, HUGE = 1e-15, 1e19
"""Norms between these have squares, and sums of squares, that float32 holds with full precision."""
ALL_IN_FLOATS: ContextVar[bool] = ContextVar("all_in_floats", default=False)
"""True where no products of queries are taken in integers, however few queries there are."""
CONTEXT.append(ALL_IN_FLOATS.get)


@contextlib.contextmanager
def all_in_floats() -> Iterator[None]:
    """Context in which products have the precision of float32."""
    token = ALL_IN_FLOATS.set(True)
    try:
        yield
    finally:
        ALL_IN_FLOATS.reset(token)


def full_precision(*operands: Shaped[Array, "..."]) -> lax.Precision:
    """Returns the precision of a product in which no bits of its operands are lost.

    NVIDIA GPUs take products of float32 with 10 bits of mantissa (TF32) unless they say otherwise. Narrower operands
    need no precision: their products are exact, and sums are float32.
    """
    return lax.Precision.HIGHEST if jnp.result_type(*operands).itemsize >= 4 else lax.Precision.DEFAULT


def rounded_to(x: Float[Array, "*n"], dtype: DTypeLike) -> Float[Array, "*n"]:
    """Converts numbers to a dtype that they are stored in, so that all that reads them reads the rounded numbers. Those
    beyond the range of a dtype of 8 bits become its largest, since float8_e4m3fn has only NaN there.

    XLA may remove a conversion to fewer bits and back (`xla_allow_excess_precision`), and does on GPUs. It leaves
    `reduce_precision`, which would however make subnormal numbers 0. On CPUs it leaves both conversions, which are
    faster there, and Apple's devices are not known to have `reduce_precision`.
    """
    kept = jnp.finfo(dtype)
    if kept.bits == 8:
        x = jnp.clip(x, -float(kept.max), float(kept.max))
    if kept.bits >= 32 or platforms.on_cpu() or platforms.on_apple():
        return x.astype(dtype)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))  # x itself may stand for numbers that were not rounded
    y = lax.reduce_precision(x, 8, kept.nmant)
    if kept.nexp < 8:
        least = float(kept.smallest_subnormal)
        y = jnp.where(jnp.abs(x) < float(kept.tiny), jnp.round(x / least) * least, y)
    return y.astype(dtype)


def full_precision_einsum(
    subscripts: str, y: Float[Array, "b h r n"], x: Shaped[Array, "b h t d"]
) -> Float[Array, "b h r m"]:
    """Einsum with tokens in full precision. bfloat16 is used as it is, with y in three parts of 8 bits each."""
    if x.dtype != jnp.bfloat16 or platforms.on_apple():
        x = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        return jnp.einsum(subscripts, y, x, precision=lax.Precision.HIGHEST)
    parts = []
    for _ in range(3):
        parts.append(rounded_to(y, jnp.bfloat16))
        y = y - parts[-1].astype(jnp.float32)
    y, precision = jnp.concatenate(parts, axis=2), full_precision(x)
    found = jnp.einsum(subscripts, y, x, precision=precision, preferred_element_type=jnp.float32)
    return functools.reduce(operator.add, jnp.split(found, 3, axis=2))


def weighted_sums(w: Float[Array, "b h r t"], x: Shaped[Array, "b h t d"]) -> Float[Array, "b h r d"]:
    """Sums of tokens with weights w. A token whose weight is 0 adds nothing, not even NaN."""
    sums = full_precision_einsum("bhrt,bhtd->bhrd", w, x)

    def careful(w: Array, x: Array) -> Array:
        finite = jnp.isfinite(x).all(-1)
        sums = full_precision_einsum("bhrt,bhtd->bhrd", w, jnp.where(finite[..., None], x, 0))
        return jnp.where(spoiled(w, finite), jnp.nan, sums)

    if not platforms.on_cpu():  # where a condition would wait for the host
        return careful(w, x)
    return lax.cond(jnp.isfinite(sums).all(), lambda w, x: sums, careful, w, x)


def spoiled(w: Float[Array, "b h r t"], finite: Bool[Array, "b h t"]) -> Bool[Array, "b h r 1"]:
    """True where a token that is not finite has a weight."""
    return ((w != 0) & ~finite[:, :, None]).any(-1, keepdims=True)


def over(x: Shaped[Array, "*n d"], size: Float[Array, "*n 1"]) -> Float[Array, "*n d"]:
    """Divides vectors by a size of each, such as its norm; 0 where that is 0.

    XLA divides by a number of each row by multiplying with its reciprocal. Above 8.5e37 that is subnormal, which is
    zero on a CPU: hence the units.
    """
    power = unit(size)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) * power / jnp.where(size > 0, size * power, 1)


def unit(norm: Float[Array, "*n 1"]) -> Float[Array, "*n 1"]:
    """Power of two that makes huge and tiny norms usual ones; 1 for the others."""
    return jnp.where(norm >= HUGE, 2.0**-80, jnp.where(norm <= TINY, 2.0**80, jnp.ones_like(norm)))


def times(w: Float[Array, "*#n"], scale: Float[Array, "*#n"]) -> Float[Array, "..."]:
    """Multiplies weights with scales of tokens; 0 where the weight is 0, whatever the scale."""
    return jnp.where(w == 0, 0, w * scale)
