"""Codes in shared memory and in their packed form.

A tile of codes is lanes (tokens, d / 8). Lane j holds the indices of the coordinates j, d / 8 + j, ..., each a field
of b bits, as in `rqjax.packing`. Above 4 bits, lanes of the low four bits are followed by lanes of the rest. All
threads move words together, so that device memory is read and written in order.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.rows import THREADS, Rows


def sections(bits: int) -> list[int]:
    """The width of the fields in each run of lanes."""
    return [bits] if bits <= 4 else [4, bits - 4]


def words_per_vector(dim: int, bits: int) -> int:
    return sum(_words(dim // 8, width) for width in sections(bits))


def write_words(rows: Rows, lanes: Any, words: Any, dim: int, bits: int, count: jax.Array) -> None:
    """Packs the lanes (tokens, d / 8 a section) of the first `count` tokens into words (tokens, words)."""
    size, first, group = dim // 8, 0, _group(dim, bits)
    for section, width in enumerate(sections(bits)):
        length = _words(size, width)

        def word(w, lane, width=width, length=length):
            if width == 4:
                return lane(w)
            if width == 3:  # the bytes of lanes that have no word of their own
                rest = max(size - length, 1)
                shift = (8 * lax.div(w, rest)).astype(jnp.uint32)
                extra = [((x >> shift) & 255) << 24 for x in lane(length + lax.rem(w, rest))]
                return [x | jnp.where(w < 3 * (size - length), e, 0) for x, e in zip(lane(w), extra, strict=True)]
            parts = [[jnp.where(k * length + w < size, x, 0) << (8 * width * k) for x in lane(k * length + w)]
                     for k in range(4 // width)]  # fmt: skip
            return [functools.reduce(operator.or_, column) for column in zip(*parts, strict=True)]

        def write(token, w, section=section, first=first, word=word):
            def lane(at):
                return rows.peek(lanes, token, section * size + jnp.minimum(at, size - group), group)

            rows.poke(words, token, first + w, word(w, lane), token < count)

        _for_each(rows, length, group, write)
        first += length


def read_lanes(rows: Rows, words: Any, lanes: Any, dim: int, bits: int, count: jax.Array) -> None:
    """The inverse of `write_words`; tokens from `count` on are those of the last one."""
    size, first, group = dim // 8, 0, _group(dim, bits)
    for section, width in enumerate(sections(bits)):
        length = _words(size, width)

        def lane(at, word, width=width, length=length):
            if width == 4:
                return word(at)
            if width == 3:
                extra = [[(x >> 24) << (8 * s) for x in word(s * (size - length) + at - length)] for s in range(3)]
                return [
                    jnp.where(at < length, x & 0xFFFFFF, a | b | c) for x, a, b, c in zip(word(at), *extra, strict=True)
                ]
            shift = (8 * width * lax.div(at, length)).astype(jnp.uint32)
            return [(x >> shift) & ((1 << 8 * width) - 1) for x in word(lax.rem(at, length))]

        def read(token, at, section=section, first=first, length=length, lane=lane):
            source = jnp.minimum(token, count - 1)

            def word(w):
                return rows.peek(words, source, first + jnp.clip(w, 0, length - group), group)

            rows.poke(lanes, token, section * size + at, lane(at, word))

        _for_each(rows, size, group, read)
        first += length


def _group(dim: int, bits: int) -> int:
    """Lanes, and words, that are moved at once: 16 bytes where no group of them is torn."""
    size = dim // 8
    lengths = [_words(size, width) for width in sections(bits)]
    return 4 if all(x % 4 == 0 for x in (size, *lengths)) else 1


def _for_each(rows: Rows, columns: int, group: int, function: Any) -> None:
    """Calls `function(token, column)` for all groups of columns of a tile, 128 at a time in the order of memory."""
    total, columns = rows.tokens * columns // group, columns // group

    def step(i, _):
        place = jnp.minimum(rows.thread + i * THREADS, total - 1)
        function(lax.div(place, columns), lax.rem(place, columns) * group)

    lax.fori_loop(0, -(-total // THREADS), step, None)


def _words(lanes: int, width: int) -> int:
    return -(-lanes * width // 4)
