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


def load_words(rows: Rows, words: Any, dim: int, bits: int, count: jax.Array) -> list[list[jax.Array]]:
    """Reads words (tokens, words) into registers; tokens from `count` on have those of the last one."""
    group = _group(dim, bits)
    places = _places(rows, words_per_vector(dim, bits), group)
    return [rows.peek(words, jnp.minimum(token, count - 1), column, group) for token, column in places]


def store_words(rows: Rows, words: Any, values: list[list[jax.Array]], dim: int, bits: int) -> None:
    """Writes what `load_words` read into shared memory (tokens, words)."""
    places = _places(rows, words_per_vector(dim, bits), _group(dim, bits))
    for (token, column), some in zip(places, values, strict=True):
        rows.poke(words, token, column, some)


def read_lanes(rows: Rows, words: Any, at: jax.Array, count: int, dim: int, bits: int) -> list[list[jax.Array]]:
    """Returns each section of `count` lanes from `at` on of the thread's token, from words (tokens, words)."""
    size, first, found = dim // 8, 0, []
    each = count if _group(dim, bits) > 1 else 1
    for width in sections(bits):
        length = _words(size, width)

        def word(w, first=first, length=length):
            return rows.peek(words, rows.token, first + jnp.clip(w, 0, length - each), each)

        def lane(at, word=word, width=width, length=length):
            if width == 4:
                return word(at)
            if width == 3:
                extra = [[(x >> 24) << (8 * s) for x in word(s * (size - length) + at - length)] for s in range(3)]
                return [
                    jnp.where(at < length, x & 0xFFFFFF, a | b | c) for x, a, b, c in zip(word(at), *extra, strict=True)
                ]
            shift = (8 * width * lax.div(at, length)).astype(jnp.uint32)
            return [(x >> shift) & ((1 << 8 * width) - 1) for x in word(lax.rem(at, length))]

        found.append([x for k in range(0, count, each) for x in lane(at + k)])
        first += length
    return found


def _group(dim: int, bits: int) -> int:
    """Lanes, and words, that are moved at once: 16 bytes where no group of them is torn."""
    size = dim // 8
    lengths = [_words(size, width) for width in sections(bits)]
    return 4 if all(x % 4 == 0 for x in (size, *lengths)) else 1


def _for_each(rows: Rows, columns: int, group: int, function: Any) -> None:
    """Calls `function(token, column)` for all groups of columns of a tile, 128 at a time in the order of memory."""
    total = rows.tokens * columns // group
    lax.fori_loop(0, -(-total // THREADS), lambda i, _: function(*_place(rows, columns, group, i)), None)


def _places(rows: Rows, columns: int, group: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the tokens and columns that `_for_each` takes."""
    return [_place(rows, columns, group, i) for i in range(-(-rows.tokens * columns // group // THREADS))]


def _place(rows: Rows, columns: int, group: int, i: Any) -> tuple[jax.Array, jax.Array]:
    columns //= group
    place = jnp.minimum(rows.thread + i * THREADS, rows.tokens * columns - 1)
    return lax.div(place, columns), lax.rem(place, columns) * group


def _words(lanes: int, width: int) -> int:
    return -(-lanes * width // 4)
