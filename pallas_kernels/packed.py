"""Arguments, results and bounds that kernels of all devices share: packed keys and values, softmax sums."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

WIDTHS: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""Widths of the fields that an index of b bits is split into, the lowest bits first. Each has an array of bytes."""
UNIT = 16
"""Tokens of keys that share bytes: a byte holds w bits of each of the tokens i, i + 2 w, i + 4 w, ... of a unit."""
LARGEST = 127 * 128
"""Largest number that two limbs hold."""
NEVER = -1e30
"""Score of a token that is not seen."""
LONGEST = 3**0.5
"""Length of a decoded vector relative to the vector, at most, in mode "unbiased"; as in `rqjax.Scaled`."""


class Packed(NamedTuple):
    """Codes of keys, or of values, for T tokens, a multiple of 128."""

    sections: tuple[jax.Array, ...]
    """Arrays of uint8, one for each of `WIDTHS`: (batch, heads, T w / 8, d) for keys, (batch, heads, d w / 8, T) for
    values. On a GPU also a ring of bits (batch, heads, bytes, T) for either, see `gpu.rings` and `gpu.columns`."""
    scales: jax.Array
    """Scales (batch, heads, groups, T) in a float dtype: group g has the dimensions from g d / groups on."""
    biases: jax.Array | None
    """Biases, shaped as `scales`."""
    levels: Any
    """Levels int8 (2**bits,), symmetric with a negative lower half if there are 4 bits. On a GPU also
    `gpu.rings.StateLevels`, those of a trellis, or a `gpu.columns.Lookup` of columns with bits of their own. None:
    index n stands for n, and biases are those of index 0."""


class Sums(NamedTuple):
    """Softmax sums over some tokens: the largest score, the sum of exp(score - largest), and that of the weighted
    values."""

    largest: jax.Array
    """The largest score; on a GPU, the largest sum of a score and the logarithm of its value's scale."""
    total: jax.Array
    values: jax.Array


def limbs(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits numbers (n, rows, d) into int8 limbs (n, 2 rows, d), the high ones first, and the low ones' unit (n,
    rows)."""
    unit = jnp.abs(y).max(-1) / LARGEST
    whole = jnp.round(y / jnp.where(unit > 0, unit, 1)[..., None]).astype(jnp.int32)
    return jnp.concatenate([whole >> 7, whole & 127], axis=1).astype(jnp.int8), unit
