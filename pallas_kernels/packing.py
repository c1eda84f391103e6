"""Codes in shared memory and in their packed form.

A tile of codes is lanes (tokens, d / 8): lane j holds the indices of the coordinates j, d / 8 + j, ..., each a field
of b bits, as in `rqjax.packing`; above 4 bits, lanes of the low four bits are followed by lanes of the rest. All
threads move words together, so that device memory is read and written in order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows import THREADS, Rows


def sections(bits: int) -> list[int]:
    """The width of the fields in each run of lanes."""
    return [bits] if bits <= 4 else [4, bits - 4]


def words_per_vector(dim: int, bits: int) -> int:
    return sum(_words(dim // 8, width) for width in sections(bits))


def write_words(rows: Rows, lanes: Any, words: Any, dim: int, bits: int, count: jax.Array) -> None:
    """Packs the lanes (tokens, d / 8 a section) of the first `count` tokens into words (tokens, words)."""
    size, first = dim // 8, 0
    for section, width in enumerate(sections(bits)):
        length = _words(size, width)

        def word(token, w, lane, width=width, length=length):
            if width == 4:
                return lane(w)
            if width == 3:  # the bytes of lanes that have no word of their own
                rest = max(size - length, 1)
                extra = (lane(length + lax.rem(w, rest)) >> (8 * lax.div(w, rest)).astype(jnp.uint32)) & 255
                return lane(w) | jnp.where(w < 3 * (size - length), extra << 24, 0)
            parts = [(k * length + w, 8 * width * k) for k in range(4 // width)]
            return sum((jnp.where(at < size, lane(at), 0) << shift for at, shift in parts), jnp.uint32(0))

        def write(token, w, section=section, first=first, word=word):
            def lane(at):
                return rows.peek(lanes, token, section * size + jnp.minimum(at, size - 1))[0]

            rows.poke(words, token, first + w, [word(token, w, lane)], token < count)

        _for_each(rows, length, write)
        first += length


def read_lanes(rows: Rows, words: Any, lanes: Any, dim: int, bits: int, count: jax.Array) -> None:
    """The inverse of `write_words`; tokens from `count` on are those of the last one."""
    size, first = dim // 8, 0
    for section, width in enumerate(sections(bits)):
        length = _words(size, width)

        def lane(at, word, width=width, length=length):
            if width == 4:
                return word(at)
            if width == 3:
                extra = [(word(s * (size - length) + at - length) >> 24) << (8 * s) for s in range(3)]
                return jnp.where(at < length, word(at) & 0xFFFFFF, extra[0] | extra[1] | extra[2])
            shift = (8 * width * lax.div(at, length)).astype(jnp.uint32)
            return (word(lax.rem(at, length)) >> shift) & ((1 << 8 * width) - 1)

        def read(token, at, section=section, first=first, length=length, lane=lane):
            source = jnp.minimum(token, count - 1)

            def word(w):
                return rows.peek(words, source, first + jnp.clip(w, 0, length - 1))[0]

            rows.poke(lanes, token, section * size + at, [lane(at, word)], token < rows.tokens)

        _for_each(rows, size, read)
        first += length


def _for_each(rows: Rows, columns: int, function: Any) -> None:
    """`function(token, column)` for all of a tile, 128 at a time in the order of memory."""
    total = rows.tokens * columns

    def step(i, _):
        place = jnp.minimum(rows.thread + i * THREADS, total - 1)
        function(lax.div(place, columns), lax.rem(place, columns))

    lax.fori_loop(0, -(-total // THREADS), step, None)


def _words(lanes: int, width: int) -> int:
    return -(-lanes * width // 4)
