"""Products with levels in int8: numbers are split into int8 limbs, so that sums are exact integers.

Shapes: queries y (batch, heads, rows, d), weights w (batch, heads, rows, tokens).
"""

import functools
from typing import TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8, Int32

from rqjax.core import operation, platforms
from rqjax.core.products import ALL_IN_FLOATS, full_precision

BASE = 128
"""Base of the int8 limbs: the highest is from -127 to 127, the others are from 0 to 127."""
QUERY_LIMBS, WEIGHT_LIMBS = 2, 3
"""Numbers of limbs of queries and of weights. They keep 15 bits of a query's largest coordinate, and 22 bits of the
largest weight. A long flat tail of small weights beside a large one is thus kept. A third limb of the queries would
take 10 to 15 % more time. The error without it is a twentieth of the codes' own at most. It is 2e-5 of the norms of
query and key, with one coordinate 1,000 times as large as the others."""
MANY_ROWS = 64
"""Number of queries from which on a CPU multiplies levels faster as float32 than by limbs. With 1000 queries a product
takes 0.4 of the time, with 128 queries 0.6, with 24 queries 1.4 times it."""
TOKENS = (2**31 - 1) // (128 * (BASE - 1))
"""Tokens over which a sum of levels times limbs stays within int32: no level is beyond 128."""

Limbs: TypeAlias = tuple[Int8[Array, "b h limbs d"], Float[Array, "b h r 1"]] | Float[Array, "b h r d"]
"""Queries as limbs and the unit of the last one; as they are where `in_floats`."""


def in_floats(rows: int) -> bool:
    """Returns whether products of so many queries are of floats: Apple's devices multiply no integers."""
    return ALL_IN_FLOATS.get() or platforms.on_apple() or (platforms.on_cpu() and rows >= MANY_ROWS)


def limbs(x: Float[Array, "b h r d"], count: int) -> tuple[Int8[Array, "b h limbs d"], Float[Array, "b h r 1"]]:
    """Splits x into `count` int8 limbs, the highest first, stacked along the rows; also returns the unit of the last
    one."""
    unit = jnp.abs(x).max(-1, keepdims=True) / ((BASE - 1) * float(BASE) ** (count - 1))
    whole = jnp.round(x / jnp.where(unit > 0, unit, 1)).astype(jnp.int32)
    bits = BASE.bit_length() - 1
    low = [(whole >> bits * k) & (BASE - 1) for k in reversed(range(count - 1))]
    return jnp.concatenate([whole >> bits * (count - 1), *low], axis=-2).astype(jnp.int8), unit


def query_limbs(y: Float[Array, "b h r d"]) -> Limbs:
    return y if in_floats(y.shape[2]) else limbs(y, QUERY_LIMBS)


def products(y: Limbs, levels: Int8[Array, "b h t d"]) -> Float[Array, "b h r t"]:
    """Inner products of queries and levels."""
    if not isinstance(y, tuple):
        return float_products(y, levels)
    found = jnp.einsum("bhrd,bhtd->bhrt", y[0], levels, preferred_element_type=jnp.int32)
    return _joined(found, y[1], QUERY_LIMBS)


def row_products(y: Limbs, levels: Int8[Array, "b h d t"]) -> Float[Array, "b h r t"]:
    """Inner products of queries and levels that lie with the tokens last."""
    if platforms.on_apple() and not isinstance(y, tuple):
        return float_products(y, jnp.swapaxes(levels, 2, 3))
    if not isinstance(y, tuple):  # as they lie: a transposed copy would take longer than the product
        return _float_einsum("bhrd,bhdt->bhrt", y, levels)
    found = jnp.einsum("bhrd,bhdt->bhrt", y[0], levels, preferred_element_type=jnp.int32)
    return _joined(found, y[1], QUERY_LIMBS)


def sums(w: Float[Array, "b h r t"], levels: Int8[Array, "b h d t"]) -> Float[Array, "b h r d"]:
    """Sums of levels with weights w, of at most `TOKENS` tokens."""
    if in_floats(w.shape[2]):
        return float_products(w, levels)
    parts, unit = limbs(w, WEIGHT_LIMBS)
    found = jnp.einsum("bhdt,bhrt->bhdr", levels, parts, preferred_element_type=jnp.int32)  # faster than into bhrd
    return _joined(jnp.swapaxes(found, 2, 3), unit, WEIGHT_LIMBS)


@operation
def float_products(y: Float[Array, "b h r n"], levels: Int8[Array, "b h m n"]) -> Float[Array, "b h r m"]:
    """Inner products with levels, in float32. Queries in bfloat16, which holds levels too, have sums in float32."""
    return _float_einsum("bhrn,bhmn->bhrm", y, levels)


def _float_einsum(subscripts: str, y: Float[Array, "b h r n"], levels: Int8[Array, "b h _ _"]) -> Float[Array, "..."]:
    result = jnp.promote_types(y.dtype, jnp.float32)
    return jnp.einsum(subscripts, y, levels.astype(y.dtype), precision=full_precision(y), preferred_element_type=result)


def _joined(found: Int32[Array, "b h limbs n"], unit: Float[Array, "b h r 1"], count: int) -> Float[Array, "b h r n"]:
    """Joins exact products with limbs to products with the numbers that the limbs stand for."""
    parts = [part.astype(jnp.float32) for part in jnp.split(found, count, axis=2)]
    return functools.reduce(lambda high, low: high * BASE + low, parts) * unit
