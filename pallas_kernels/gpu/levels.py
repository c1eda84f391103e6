"""Packed codes by levels in shared memory as factors of products on tensor cores: int8, in the registers of a warp.

Codes lie in groups of L rows: the 16 tokens of a unit of keys, all d dimensions of transposed values. A byte holds w
bits of each of the rows i, i + L w / 8, i + 2 L w / 8, ... So the rows i and i + L / 2 are at the same place of a
byte's two nibbles, for w = 4, 2 and 1 alike. Sums over k are in any order, so a thread loads 16 neighboring bytes.

A block has 256 tokens, 64 for each of four warps. Thread (g, q) of a warp has the keys of eight tokens, in four rows of
bytes, and 16 tokens of the values of two dimensions.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.registers import byte_permute
from pallas_kernels.gpu.warps import Word
from pallas_kernels.packed import UNIT, WIDTHS

BLOCK, PAGE = 256, 128
"""Tokens of a step and of a page."""
SLICE = 64
"""Dimensions of keys that four threads load 16 bytes each of."""
TOKENS = (0, 1, 2, 3, 8, 9, 10, 11)
"""Tokens of a thread after `Place.token`."""
SIGNS, UPPER = np.uint32(0x80808080), np.uint32(0xF0F0F0F0)
INTERLEAVED = ((0x4140, 0x4342), (0x1404, 0x3424))
"""Selectors of a word's bytes 0, 1 and 2, 3 with zeros after each, and with zeros before each."""


class Place(NamedTuple):
    """Place of each thread in its warp, and its tokens and rows."""

    lane: jax.Array
    warp: jax.Array
    g: jax.Array
    q: jax.Array
    token: jax.Array
    """The first of the thread's tokens in a block, see TOKENS."""
    part: jax.Array
    """The warp's number among those of a half."""
    half: jax.Array | None
    """Number of the half of the block that the warp's tokens are in; None if halves lie side by side."""
    interpret: Any

    @classmethod
    def of(cls, halves: int, interpret: Any) -> "Place":
        """Returns the place of each thread in blocks that come in one or two pieces."""
        thread = registers.threads(interpret=interpret)
        warp, lane = thread >> 5, thread & 31
        g, q = lane >> 2, lane & 3
        part, half = (warp, None) if halves == 1 else (warp & 1, warp >> 1)
        return cls(lane, warp, g, q, (warp << 6) + ((g >> 1) << 4) + ((g & 1) << 2), part, half, interpret)

    @property
    def key(self) -> jax.Array:
        """The first of the thread's tokens in its half of the block."""
        return (self.part << 6) + ((self.g >> 1) << 4) + ((self.g & 1) << 2)

    @property
    def value(self) -> jax.Array:
        """The first of 16 tokens of values in the half of the block."""
        return (self.part << 6) + (self.q << 4)

    @property
    def row(self) -> jax.Array:
        """Row of eight dimensions of values; rows of neighboring threads are in different banks."""
        return ((self.g & 1) << 2) + (self.g >> 1)


class Factor(NamedTuple):
    """Left side of a product on tensor cores."""

    total: int
    """Number of the sum that the product is added to."""
    first: int
    """Number of the first of two words of the right side."""
    words: list[Word]


class Levels(NamedTuple):
    """Static facts about keys, or about values."""

    dim: int
    bits: int
    groups: int
    """Groups of dimensions, each with scales of its own."""
    biased: bool
    tabled: bool
    """True if levels are looked up. If not, an index n of 4 bits becomes 16 (n - 8)."""
    interleaved: bool
    """True if factors are levels of lower and upper nibbles by turns, as they are looked up.

    Right sides then have zeros in the place of the other ones, and the halves of 16 levels are multiplied apart. A word
    of 8 indices takes 7 instructions instead of 14, but two or four times the products: too many above 4 queries.
    """

    passes = 2
    """Calls of `key_factors`, which share the eight tokens of a thread."""
    parts = 0
    """Parts of keys that a loop takes one by one."""
    memory = 0
    """Rows of 128 bytes of a table in shared memory."""

    @property
    def unit(self) -> float:
        """Number that factors hold multiples of."""
        return 1.0 if self.tabled else 1 / 16

    @property
    def terms(self) -> int:
        """Sums of a product: negative and positive levels of 4 bits are multiplied apart if they are interleaved."""
        return 2 if self.interleaved and self.bits == 4 else 1

    @property
    def loaded(self) -> int:
        """Words of codes for four words of the right side."""
        return 1 if self.interleaved else 4

    def table(self, levels: jax.Array | None) -> jax.Array:
        """The levels in words of 4 bytes.

        A lookup by `byte_permute` takes 8 levels, so 4 bits take two, the second with all bits of the index flipped.
        An index of the other half finds 0, because `byte_permute` then repeats the sign bit. Levels of 4 bits lack it:
        interleaved, they are magnitudes, -1 to -8 and then 8 to 15 are the same 8 of them; else their signs follow.
        """
        middle = 2 ** (self.bits - 1)
        levels = jnp.arange(-middle, middle, dtype=jnp.int8) if levels is None else jnp.asarray(levels)
        if self.terms == 2:
            levels = levels[:7:-1]
        elif self.bits == 4:
            levels = jnp.concatenate([levels[:8], levels[:7:-1]]) & 127
        else:
            levels = jnp.pad(levels, (0, 8 - 2 * middle))
        return lax.bitcast_convert_type(levels.reshape(-1, 4), jnp.uint32)

    def right(self, words: list[Word], *, interpret: Any) -> Iterator[list[Word]]:
        """Right sides for `left`, four words for each `loaded` words of codes, from four words of 16 bytes."""
        if not self.interleaved:
            yield words
            return
        for word in words:
            yield [
                byte_permute(word, jnp.uint32(0), selector, interpret=interpret)
                for half in INTERLEAVED
                for selector in half
            ]

    def left(self, rows: list[list[Word]], table: Any, *, interpret: Any) -> list[Factor]:
        """Left sides from `loaded` words of the indices of two rows."""
        if self.interleaved:
            (a,), (b,) = rows
            a, b = (self._looked_up(word, table, interpret)[0] for word in (a, b))
            return [
                Factor(half * self.terms + term, 2 * half, [a[term][0], b[term][0], a[term][1], b[term][1]])
                for half in range(2)
                for term in range(self.terms)
            ]
        found = []
        by_half = (zip(*(self._by_nibble(word, table, interpret) for word in words), strict=True) for words in rows)
        for half, (a, b) in enumerate(zip(*by_half, strict=True)):
            found += [Factor(half, k, [a[k], b[k], a[k + 1], b[k + 1]]) for k in (0, 2)]
        return found

    def _looked_up(self, word: Word, table: Any, interpret: Any) -> tuple[list[list[Word]], Word]:
        """Looks up levels by halves of the table, each as two words: of bytes 0 and 1, and of bytes 2 and 3.

        Levels of lower and upper nibbles are there by turns. Also returns the indices of the last half.
        """
        *words, minus_one = table
        indices = [word, warps.complement(word, minus_one, interpret=interpret)][: 1 + (self.bits == 4)]
        found = [
            [
                byte_permute(*(words[-2:] if k else words[:2]), each >> below if below else each, interpret=interpret)
                for below in (0, 16)
            ]
            for k, each in enumerate(indices)
        ]
        return found, indices[-1]

    def _by_nibble(self, word: Word, table: Any, interpret: Any) -> tuple[Word, Word]:
        """Levels of the lower and of the upper nibbles of a word."""
        if not self.tabled:
            return (word << 4) & UPPER ^ SIGNS, word & UPPER ^ SIGNS
        found, flipped = self._looked_up(word, table, interpret)
        pairs = [functools.reduce(jnp.bitwise_or, pair) for pair in zip(*found, strict=True)]
        lower, upper = (byte_permute(*pairs, selector, interpret=interpret) for selector in (0x6420, 0x7531))
        return (lower | flipped << 4 & SIGNS, upper | flipped & SIGNS) if self.bits == 4 else (lower, upper)

    def query_words(self, limbs: Any, row: Any, part: int, place: Place) -> list[Word]:
        """Four words of a row of limbs: 16 of 64 dimensions."""
        offset = row * limbs.shape[1] + SLICE * part + 16 * place.q
        return warps.load(limbs, offset, 4, interpret=place.interpret)

    def token(self, pair: int, half: int, i: int) -> int:
        """Number among TOKENS of a row of a sum of `key_factors`."""
        return 4 * half + 2 * pair + i

    def key_factors(
        self, sections: list[Any], table: Any, group: int, pair: int, place: Place
    ) -> Iterator[tuple[int, list[Factor]]]:
        """Yields the numbers of right sides, and factors for each, of two rows: four tokens."""
        count, vectors = self.dim // SLICE // self.groups, 4 // self.loaded
        for part in range(group * count, (group + 1) * count):
            rows = [self.key_words(sections, 2 * pair + i, part, place) for i in range(2)]
            for k in range(vectors):
                some = [row[k * self.loaded :][: self.loaded] for row in rows]
                yield vectors * part + k, self.left(some, table, interpret=place.interpret)

    def value_factors(
        self, sections: list[Any], table: Any, place: Place
    ) -> Iterator[tuple[list[int], list[list[Factor]]]]:
        """Yields the first numbers of sums, see `dimension`, and factors for each right side."""
        for i in range(self.dim // 32):
            rows = [self.value_words(sections, 16 * i + 8 * r, place) for r in range(2)]
            some = ([row[k : k + self.loaded] for row in rows] for k in range(0, 4, self.loaded))
            yield [4 * i, 4 * i + 2], [self.left(words, table, interpret=place.interpret) for words in some]

    def dimension(self, number: Any) -> Any:
        """Dimension of a sum, but for `Place.row`: of each four numbers two are d / 2 above the others."""
        return (number >> 2 << 4) + ((number & 1) << 3) + (number >> 1 & 1) * (self.dim // 2)

    def key_words(self, sections: list[Any], j: int, slice_: int, place: Place) -> list[Word]:
        """Indices of the tokens j and 8 + j of TOKENS in the lower and upper nibbles of 4 words: 64 dimensions."""
        unit, index = (place.part << 2) + (place.g >> 1), ((place.g & 1) << 2) + j

        def load(refs: Any, width: int) -> list[Word]:
            rows, columns = UNIT * width // 8, refs[0].shape[-1]
            row = unit * rows + (index & (rows - 1))
            offset = registers.swizzled(row, 16 * place.q + SLICE * slice_, columns, min(columns, 128))
            words = _load(refs, offset, place)
            return words if width == 4 else [word >> self._shift(index, rows, width) for word in words]

        return self._indices(sections, load)

    def value_words(self, sections: list[Any], first: int, place: Place) -> list[Word]:
        """Indices of the dimensions first + `row` and first + d / 2 + `row` in the nibbles of 4 words: 16 tokens."""

        def load(refs: Any, width: int) -> list[Word]:
            columns = refs[0].shape[-1]
            turn, row = divmod(first, self.dim * width // 8)
            offset = registers.swizzled(place.row, place.value, columns, PAGE) + row * columns
            words = _load(refs, offset, place)
            return [word >> np.uint32(width * turn) for word in words] if turn else words

        return self._indices(sections, load)

    def _shift(self, index: jax.Array, rows: int, width: int) -> Word:
        return (width * (index >> rows.bit_length() - 1)).astype(jnp.uint32)

    def _indices(self, sections: list[Any], load: Any) -> list[Word]:
        found, below = [jnp.uint32(0)] * 4, 0
        for refs, width in zip(sections, WIDTHS[self.bits], strict=True):
            words = load(refs, width)
            if width < 4:
                words = [word & _each(2**width - 1) for word in words]
            found = [before | word << below for before, word in zip(found, words, strict=True)] if below else words
            below += width
        return found


def _load(refs: Any, offset: jax.Array, place: Place) -> list[Word]:
    return warps.load(refs, offset, 4, half=place.half, tiled=True, interpret=place.interpret)


def _each(nibble: int) -> np.uint32:
    """Returns a word of eight such nibbles."""
    return np.uint32(nibble * 0x11111111)
