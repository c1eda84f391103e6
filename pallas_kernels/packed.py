"""What decode attention takes and returns, on all devices: packed keys and values, and softmax sums."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

WIDTHS: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""The fields that indices of b bits are split into, the lowest bits first; an array of bytes for each."""
UNIT = 16
"""Tokens of keys that share bytes: a byte holds w bits of each of the tokens i, i + 2 w, i + 4 w, ... of a unit."""
LARGEST = 127 * 128
"""Of the numbers that two limbs hold."""
NEVER = -1e30
"""The score of a token that is not seen."""


class Packed(NamedTuple):
    """Codes of keys, or of values, of T tokens, a multiple of 128."""

    sections: tuple[jax.Array, ...]
    """uint8, one for each of `WIDTHS`: of keys (batch, heads, T w / 8, d), of values (batch, heads, d w / 8, T). On a
    GPU also a ring of bits, of either, (batch, heads, bytes, T), see `gpu.streams` and `gpu.columns`."""
    scales: jax.Array
    """(batch, heads, groups, T) in a float dtype: group g is of the dimensions from g d / groups on."""
    biases: jax.Array | None
    """As `scales`."""
    levels: Any
    """int8 (2**bits,); of 4 bits symmetric, the lower half is negative. On a GPU also a `gpu.streams.Companded`, which
    makes the levels of states, or a `gpu.columns.Lookup` of columns with bits of their own. None: index n stands for n,
    biases are those of index 0."""


class Sums(NamedTuple):
    """Of some tokens: the largest score, the sum of exp(score - largest), and that of the values so weighted."""

    largest: jax.Array
    total: jax.Array
    values: jax.Array


def limbs(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 (n, 2 rows, d) of numbers (n, rows, d), the high limbs first, and the unit (n, rows) of the low ones."""
    unit = jnp.abs(y).max(-1) / LARGEST
    whole = jnp.round(y / jnp.where(unit > 0, unit, 1)[..., None]).astype(jnp.int32)
    return jnp.concatenate([whole >> 7, whole & 127], axis=1).astype(jnp.int8), unit
