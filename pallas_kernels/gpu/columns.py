"""Codes of columns with bits and levels of their own as factors of products on tensor cores: int8, in registers.

As in `rings`, the codes of a vector are a ring of bits. The ring's bytes are rows, and tokens lie side by side. An
index is up to eight bits of the ring, from any bit on, and its level is looked up in shared memory. The places of both
are looked up too: they differ by thread, and one kernel serves all allocations of bits. The indices of four neighboring
tokens are the bytes of a word. Rows are swizzled only if 8 divides their number, since a tile has eight.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.levels import SLICE, Factor, Levels, Place
from pallas_kernels.gpu.rings import Ring, factors_of
from pallas_kernels.gpu.warps import Word

MAX_ROWS, MAX_SIZE = 256, 2**15 - 2**12
"""Rows of a ring, and bytes of levels, that fit into `Columns.table`."""
FACTS = 32
"""Bytes of a table that hold the place of a column."""


class Lookup(NamedTuple):
    """Levels of columns, whose number is a multiple of 64; indices are those of a ring of all rows."""

    starts: Any
    """int32 (columns,): the lowest bit of each index."""
    widths: Any
    """int32 (columns,): bits of each index, from 0 to 8."""
    places: Any
    """int32 (columns,): where the levels of each begin, a multiple of 2**width."""
    levels: Any
    """int8 (1 or heads, size), the size a multiple of 128."""


class Columns(NamedTuple):
    """Static facts about keys, or about values."""

    dim: int
    """Columns, at most 256."""
    rows: int
    """Bytes of the ring."""
    size: int
    """Bytes of levels."""
    groups = 1
    biased = True
    """True, with the scale as the bias: one more column has the level 1."""
    unit = 1.0
    """Number that factors hold multiples of."""
    passes, terms, parts = 1, 1, 0
    loaded = 4
    """Words of 16 bytes of codes for four words of the right side."""

    right, dimension, query_words = Ring.right, Ring.dimension, Levels.query_words

    @property
    def bits(self) -> float:
        return 8 * self.rows / self.dim

    @property
    def memory(self) -> int:
        """Rows of 128 bytes of a table."""
        return (self.size + FACTS * self.dim) // 128

    def table(self, lookup: Lookup) -> jax.Array:
        """int8 (1 or heads, `memory`, 128): the levels, and after them eight words of each column, see `_levels`."""
        starts, widths, places = (jnp.asarray(x, jnp.int32) for x in lookup[:3])
        if self.rows > MAX_ROWS or self.size > MAX_SIZE:
            raise ValueError(f"expected rings and levels of at most {MAX_ROWS} and {MAX_SIZE} bytes")
        low, high = (self._row((starts // 8 + k) % self.rows) for k in range(2))
        used, shift = (1 << widths) - 1, starts % 8
        kept = used & 255 >> shift
        bytes_of = [0x01010101 * x.astype(jnp.uint32) for x in (kept, used & ~kept, places & 255)]
        facts = [low, high, shift, 8 - shift, *bytes_of, places & ~255]
        words = lax.bitcast_convert_type(jnp.stack([x.astype(jnp.uint32) for x in facts], axis=1), jnp.int8)
        levels = jnp.asarray(lookup.levels)
        levels = levels.reshape(len(levels), -1, 128)
        words = jnp.broadcast_to(words.reshape(1, -1, 128), (len(levels), FACTS * self.dim // 128, 128))
        return jnp.concatenate([levels, words], axis=1)

    def token(self, pass_: int, pair: int, i: int) -> int:
        """Number among TOKENS of a row of a sum of `key_factors`."""
        return 2 * pair + i

    def key_factors(
        self, sections: list[Any], table: Any, group: int, pass_: int, place: Place
    ) -> Iterator[tuple[int, list[Factor]]]:
        """Yields the numbers of right sides, and factors for each, of eight tokens in pairs."""
        runs = [place.key, place.key + 8]
        for part in range(self.dim // SLICE):
            rows = []
            for first in range(SLICE * part, SLICE * part + 16, 4):
                columns = [16 * place.q + (first + each) for each in range(4)]
                levels = [self._levels(sections[0], table, column, runs, 1, place) for column in columns]
                by_token = (some for words in zip(*levels, strict=True) for some in zip(*words, strict=True))
                rows.append([warps.joined(some) for some in by_token])
            yield part, factors_of(list(zip(*rows, strict=True)))

    def value_factors(
        self, sections: list[Any], table: Any, place: Place
    ) -> Iterator[tuple[list[int], list[list[Factor]]]]:
        """Yields the first numbers of sums, see `dimension`, and factors for each right side."""
        for number in range(0, self.dim // 8, 2):
            columns = [place.row + 8 * (number + r) for r in range(2)]
            rows = [self._levels(sections[0], table, column, [place.value], 4, place) for column in columns]
            yield [number], [factors_of([[warps.joined(some) for some in row] for row in rows])]

    def _row(self, row: jax.Array) -> jax.Array:
        """Returns the address where a row begins: the byte of its column k is at this xor k."""
        return 128 * row | (row & 7) << 4 if self.rows % 8 == 0 else 128 * row

    def _levels(
        self, refs: Any, table: Any, column: jax.Array, tokens: list[jax.Array], count: int, place: Place
    ) -> list[list[Word]]:
        """Levels of four tokens for each of `count` words from `tokens` on, each in the lowest byte of a word."""
        interpret, tiled = place.interpret, self.rows % 8 == 0
        facts = (warps.load(table, self.size + FACTS * column + at, 4, interpret=interpret) for at in (0, FACTS // 2))
        (low, high, shift, rest), (kept, more, first, page) = facts
        low, high = (
            [
                word
                for token in tokens
                for word in warps.load(
                    refs, row ^ token.astype(jnp.uint32), count, half=place.half, tiled=tiled, interpret=interpret
                )
            ]
            for row in (low, high)
        )
        indices = [a >> shift & kept | first | b << rest & more for a, b in zip(low, high, strict=True)]
        return registers.look_up(table, indices, page, interpret=interpret)
