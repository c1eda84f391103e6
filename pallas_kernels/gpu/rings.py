"""Trellis codes in shared memory as factors of products on tensor cores: int8, in the registers of a warp.

The codes of a vector are a ring of bits: rows are its bytes, columns are tokens. Eight coordinates whose codes follow
on each other are a lane, of `bits` bytes: coordinate i is number i / lanes of lane i mod lanes. The state of a
coordinate is the window of eight bits that ends with its code. Its level is looked up in shared memory, where each
thread of a warp has a bank of its own. Two neighboring bytes of a lane are half of a word: a shift and a mask make the
addresses of two levels.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.levels import PAGE, Factor, Place
from pallas_kernels.gpu.registers import byte_permute
from pallas_kernels.gpu.warps import Word

STATE = 7
"""Lowest bit of a state in an address: a row of the table has 128 bytes, a word for each thread of a warp."""
MASK = np.uint32(0x7F807F80)
STATES = 256


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StateLevels:
    """Levels of the states of a trellis. They are static, so that keys and values of one trellis share a table."""

    numbers: tuple[int, ...]
    """The level of each of the 256 states, in int8."""


class Ring(NamedTuple):
    """Static facts about keys, or about values."""

    dim: int
    bits: int
    levels: StateLevels
    groups = 1
    biased = False
    unit = 1.0
    """Number that factors hold multiples of."""
    passes, terms, parts = 2, 1, 0
    loaded = 4
    """Words of 16 bytes of codes for four words of the right side."""
    memory = STATES
    """Rows of 128 bytes of a table."""

    @property
    def lanes(self) -> int:
        return self.dim // 8

    def table(self, levels: StateLevels) -> jax.Array:
        """int8 (1, 256, 128): each row has the level of a state in the bytes of words."""
        return jnp.asarray(np.repeat(np.array(levels.numbers, np.int8), 128).reshape(1, STATES, 128))

    def right(self, words: list[Word], *, interpret: Any) -> Iterator[list[Word]]:
        """Right sides, four words for each four."""
        yield words

    def query_words(self, limbs: Any, row: Any, part: int, place: Place) -> list[Word]:
        """Four words of a row of limbs, in the order of `key_factors`."""

        def load(dim: Any) -> Word:
            return warps.load(limbs, row * self.dim + dim, 1, interpret=place.interpret)[0]

        if self.lanes >= 16:
            each = self.lanes // 4
            return [
                load(w // (each // 4) * self.lanes + each * place.q + w % (each // 4) * 4)
                for w in range(4 * part, 4 * part + 4)
            ]
        found = []
        for w in range(4 * part, 4 * part + 4):  # two coordinates each of two numbers
            pair = [load(16 * w + 8 * k + (place.q >> 1 << 2)) for k in range(2)]
            selector = jnp.where((place.q & 1) == 1, jnp.uint32(0x7632), jnp.uint32(0x5410))
            found.append(byte_permute(*pair, selector, interpret=place.interpret))
        return found

    def token(self, run: int, pair: int, i: int) -> int:
        """Number among TOKENS of a row of a sum of `key_factors`."""
        return 4 * run + 2 * pair + i

    def key_factors(
        self, sections: list[Any], table: Any, group: int, run: int, place: Place
    ) -> Iterator[tuple[int, list[Factor]]]:
        """Yields the numbers of right sides, and factors for each, of four tokens in pairs."""
        fields = self._key_fields(sections[0], run, place)  # by pairs of lanes, bytes, tokens
        count = len(fields)
        units = [(plane, pair) for plane in range(8) for pair in range(count)]
        for part in range(self.dim // 64):
            some = units[8 * part :][:8]
            offsets = [[self._address(fields[pair], token, plane, place) for plane, pair in some] for token in range(4)]
            words = warps.look_up(table, [x for row in offsets for x in row], interpret=place.interpret)
            yield part, factors_of([words[4 * token :][:4] for token in range(4)])

    def _key_fields(self, refs: Any, run: int, place: Place) -> list[list[list[Word]]]:
        """Neighboring bytes of two lanes as halves of words, by pairs of lanes, bytes and tokens."""
        columns, each = refs[0].shape[-1], self.lanes // 4
        permute = lambda a, b, selector: byte_permute(a, b, selector, interpret=place.interpret)  # noqa: E731
        rows = []
        for k in range(each * self.bits + 1):
            row = each * self.bits * place.q + (k - 1)
            row = jnp.where(row < 0, self.dim * self.bits // 8 - 1, row) if k == 0 else row
            offset = registers.swizzled(row, place.key + 8 * run, columns, PAGE)
            (word,) = warps.load(refs, offset, 1, half=place.half, tiled=True, interpret=place.interpret)
            rows.append(word)
        found = []
        for pair in range(each // 2):
            by_byte = []
            for k in range(self.bits):
                lanes = [rows[(2 * pair + i) * self.bits + k :][:2] for i in range(2)]
                halves = [[permute(*lane, selector) for lane in lanes] for selector in (0x5140, 0x7362)]
                by_byte.append([permute(*some, selector) for some in halves for selector in (0x5410, 0x7632)])
            found.append(by_byte)
        return found

    def value_factors(
        self, sections: list[Any], table: Any, place: Place
    ) -> Iterator[tuple[list[int], list[list[Factor]]]]:
        """Yields the first numbers of sums, see `dimension`, and factors for each right side."""
        for first in range(0, self.lanes, 16):
            lanes = range(first, min(first + 16, self.lanes), 8)
            fields = [self._value_fields(sections[0], lane, place) for lane in lanes]
            for plane in range(0, 8, 2 // len(lanes)):
                rows = [(fields[r % len(lanes)], plane + r // len(lanes)) for r in range(2)]
                offsets = [self._address(row, token, number, place) for row, number in rows for token in range(8)]
                words = warps.look_up(table, offsets, interpret=place.interpret)
                number = (self.lanes * plane + first) // 8
                yield [number], [factors_of([words[:4], words[4:]])]

    def dimension(self, number: Any) -> Any:
        """Dimension of a sum, but for `Place.row`."""
        return 8 * number

    def _value_fields(self, refs: Any, lane: int, place: Place) -> list[list[Word]]:
        """Neighboring bytes of a lane for 16 tokens as halves of words, by bytes and pairs of tokens."""
        columns, total, rows = refs[0].shape[-1], self.dim * self.bits // 8, []
        for k in range(self.bits + 1):
            row = self.bits * (place.row + lane) + (k - 1)
            row = jnp.where(row < 0, total - 1, row) if k == 0 and lane == 0 else row
            offset = registers.swizzled(row, place.value, columns, PAGE)
            rows.append(warps.load(refs, offset, 4, half=place.half, tiled=True, interpret=place.interpret))
        return [
            [
                byte_permute(*pair, selector, interpret=place.interpret)
                for pair in zip(*rows[k : k + 2], strict=True)
                for selector in (0x5140, 0x7362)
            ]
            for k in range(self.bits)
        ]

    def _address(self, fields: list[list[Word]], token: int, number: int, place: Place) -> Word:
        """Addresses in the table of two states: of neighboring lanes, or of one lane and neighboring tokens."""
        start = self.bits * (1 + number)
        byte = min(start // 8, self.bits - 1)
        word, shift = fields[byte][token], STATE - (start - 8 * byte)
        word = word << np.uint32(shift) if shift > 0 else word >> np.uint32(-shift) if shift else word
        return word & MASK | (place.lane * 0x40004).astype(jnp.uint32)


def factors_of(rows: list[list[Word]]) -> list[Factor]:
    """Returns left sides for each two of four words of two rows, whose sums are numbered by pairs of rows."""
    return [
        Factor(pair, k, [rows[2 * pair + i][k + j] for j in range(2) for i in range(2)])
        for pair in range(len(rows) // 2)
        for k in (0, 2)
    ]
