"""Packed codes on a TPU: words of four bytes, and the int8 levels that they stand for.

A TPU has no arithmetic on bytes, but its products take int8. So indices stay four to a word of 32 bits as long as they
can. Levels are found among the eight sublanes of a register, one an instruction, at their place in the word.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.packed import UNIT

LANES, SUBLANES = 128, 8
ONES = 0x01010101


def table(levels: jax.Array, bits: int) -> jax.Array:
    """Returns the table in which `unpacked` finds levels, int32 (8, 128): one a sublane, the upper half if 4 bits."""
    entries = jnp.resize(levels[8:] if bits == 4 else levels, SUBLANES).astype(jnp.int32) & 0xFF
    return jnp.broadcast_to(entries[:, None], (SUBLANES, LANES))


def unpacked(sections: tuple[jax.Array, ...], bits: int, entries: jax.Array | None, *, by_token: bool) -> jax.Array:
    """int8 levels (rows, n) of packed uint8 (rows w / 8, n), an array for each width; indices, if there are no entries.

    Rows of tokens come field by field, see `order`.

    Args:
      sections: the packed indices.
      bits: of an index.
      entries: of `table`; of 4 bits the levels are symmetric.
      by_token: whether rows are tokens, 16 to a tile, and not dimensions.
    """
    words = [pltpu.bitcast(section, jnp.int32) for section in sections]  # byte k of word i is that of row 4 i + k
    if bits in (1, 3):
        words[-1] = (_pairs_of_tokens if by_token else _pairs)(words[-1])
    parts = []
    for field in range(_fields(bits)):
        found = [_right(word, 8 // _fields(bits) * field) for word in words]
        mask = ONES * (2**bits - 1)
        x = (found[0] & 3 * ONES | (found[1] & ONES) << 2) if bits == 3 else found[0] & mask
        parts.append(x if entries is None else _levels(x, bits, entries))
    return pltpu.bitcast(jnp.concatenate(parts, axis=0), jnp.int8)


def order(bits: int, rows: int, page: int) -> jax.Array:
    """Returns the place of each token of a page among its unpacked rows, (rows, page)."""
    t = lax.broadcasted_iota(jnp.int32, (rows, page), 1)
    size = UNIT // _fields(bits)  # rows of a unit that lie together
    field = (t & UNIT - 1) >> size.bit_length() - 1
    return field * (page * size // UNIT) + (t >> UNIT.bit_length() - 1) * size + (t & size - 1)


def _fields(bits: int) -> int:
    """Returns how many indices share a byte; for 1 and 3 bits, after `_pairs`."""
    return 2 if bits == 4 else 4


def _levels(x: jax.Array, bits: int, entries: jax.Array) -> jax.Array:
    """Bytes of indices as bytes of levels."""
    negative = None
    if bits == 4:  # counted from the middle, to both sides
        negative = _right(x, 3) & ONES ^ ONES
        x = (x ^ negative * 7) & 7 * ONES
    found = None
    for byte in range(4):
        lane = _right(x, 8 * byte) & 0xFF if byte < 3 else _right(x, 24)
        level = _gathered(entries << 8 * byte, lane)
        found = level if found is None else found | level
    assert found is not None
    if negative is None:
        return found
    return (found ^ negative * 127) + negative ^ negative << 7  # the negative of a byte below 128


def _gathered(entries: jax.Array, sublanes: jax.Array) -> jax.Array:
    rows, width = sublanes.shape
    wide = jnp.concatenate([entries] * -(-width // LANES), axis=1)[:, :width]
    parts = [
        jnp.take_along_axis(wide, sublanes[k : k + SUBLANES], axis=0, mode="promise_in_bounds")
        for k in range(0, rows, SUBLANES)
    ]
    return jnp.concatenate(parts, axis=0)


def _pairs(x: jax.Array) -> jax.Array:
    """Turns rows of bytes with eight bits into twice as many with four, field f at bit 2 f; bits between mean
    nothing."""
    return jnp.concatenate([x, _right(x, 1)], axis=0)


def _pairs_of_tokens(x: jax.Array) -> jax.Array:
    """Does the same for units of tokens: two rows of bytes of a unit become four."""
    row = lax.broadcasted_iota(jnp.int32, (SUBLANES, x.shape[1]), 0)
    found = []
    for k in range(0, len(x), SUBLANES // 2):
        twice = jnp.concatenate([x[k : k + SUBLANES // 2]] * 2, axis=0)
        twice = jnp.take_along_axis(twice, row >> 1, axis=0, mode="promise_in_bounds")
        found.append(jnp.where(row & 1, _right(twice, 16), twice & 0xFFFF))
    halves = jnp.concatenate(found, axis=0)
    return halves | halves << 15


def _right(x: jax.Array, count: int) -> jax.Array:
    return lax.shift_right_logical(x, jnp.int32(count)) if count else x
