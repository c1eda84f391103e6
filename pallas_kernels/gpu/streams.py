"""Trellis codes in shared memory as tiles of levels in registers, int8, for products on tensor cores.

The codes of a vector are a ring of bits: rows are its bytes, columns are tokens. Eight coordinates whose codes follow
on each other are a lane, of `bits` bytes: coordinate i is number i / lanes of lane i mod lanes. The state of a
coordinate is the window of eight bits that ends with its code. Windows at the same place of four bytes are the bytes of
a word, so that all that follows is done four at a time.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu import registers, tensor_cores
from pallas_kernels.gpu.registers import ROW, SLICE, THREADS, byte_permute

TOKENS = 128
"""Tokens of a block: four for each of the 32 rows of threads, which take them from one word."""
WINDOW = 8
Word: TypeAlias = jax.Array
"""uint32 (128,): a register of each thread."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Companded:
    """Levels of states by arithmetic.

    A state s is first folded to s ^ (s >> fold), unless `fold` is 0. Let p = s multiplier mod 256, and x the distance
    of p from the middle of 0 to 255, rounded down. The level is half of the offset plus the sum of
    slope * max(x - start, 0) over the bends (start, slope), with the sign of p - 127.5. The first bend is at 0.
    """

    multiplier: int
    bends: tuple[tuple[int, int], ...]
    offset: int = 0
    fold: int = 0

    def __call__(self, states: Word, *, interpret: Any) -> Word:
        """The levels, int8, of four states."""
        place = states ^ (states >> self.fold & _each(255 >> self.fold)) if self.fold else states
        even, odd = ((place & mask) * np.uint32(self.multiplier) for mask in (EVEN, ~EVEN))
        place = byte_permute(even, odd, 0x7250, interpret=interpret)
        upper = _signs(place, interpret)
        distance = (place ^ ~upper) & _each(127)
        total = distance * np.uint32(self.bends[0][1]) + _each(self.offset)
        for start, slope in self.bends[1:]:
            beyond = (distance | _each(128)) - _each(start)  # in each byte 128 or more, if it is beyond the start
            total += (beyond & _signs(beyond, interpret) & _each(127)) * np.uint32(slope)
        size = total >> 1 & _each(127)
        # -n = ~n + 1, without a carry from byte to byte: the highest bit of each byte is set last.
        return ((size ^ (~upper & _each(127))) + (~upper & _each(1))) ^ (~upper & _each(128))


EVEN = np.uint32(0x00FF00FF)


class Stream(NamedTuple):
    """Static facts about keys, or about values."""

    dim: int
    bits: int
    levels: Companded
    groups = 1
    biased = False
    unit = 1.0
    """Number that tiles hold multiples of."""

    @property
    def lanes(self) -> int:
        return self.dim // 8

    def table(self, levels: Companded) -> jax.Array:
        """Returns a placeholder: nothing is looked up."""
        return jnp.zeros(4, jnp.uint32)

    def token(self, tile: int, row: jax.Array) -> tuple[int, jax.Array]:
        """Returns the token in a row of a tile of keys: the sum of a multiple of SLICE and a part that differs by
        row."""
        return 0, ((row >> 4) << 5) + ((row & 7) << 2) + 2 * tile + (row >> 3 & 1)

    def numbers(self, ref: Any, tile: int, *, interpret: Any) -> jax.Array:
        """Returns numbers of the tokens in a tile of keys, (64,)."""
        row = registers.iota((SLICE,), 0, ROW, interpret=interpret)
        return registers.gather(ref, self.token(tile, row)[1], interpret=interpret)

    def key_tiles(self, refs: Any, table: Any, tokens: int, *, interpret: Any) -> Iterator[list[jax.Array]]:
        """Tiles of 64 tokens, see `token`, each as slices of d."""
        assert tokens == TOKENS
        rings = self._key_rings(refs[0], interpret)
        planes, groups = range(0, 8, max(1, 16 // self.lanes)), range(len(rings))
        for tile in range(TOKENS // SLICE):
            halves = (
                [
                    self.levels(_window(rings[group][token], self.bits * (1 + plane)), interpret=interpret)
                    for plane in planes
                    for group in groups
                ]
                for token in (2 * tile, 2 * tile + 1)
            )
            stacked = (registers.stack(half, interpret=interpret) for half in halves)
            yield tensor_cores.fragments(*stacked, interpret=interpret)

    def _key_rings(self, ref: Any, interpret: Any) -> list[list[list[Word]]]:
        """Returns by groups of 16 lanes, and by the thread's four tokens, the codes of its four lanes in the bytes of
        words.

        The eight bits before them come first. If there are 8 lanes, two threads share each, with every other
        coordinate.

        Before them are the eight bits that come before. Of 8 lanes, two threads have every other coordinate.
        """
        thread = registers.threads(interpret=interpret)
        column, quarter = thread & -4, thread & 3

        def load(row):
            at = registers.swizzled(row, column, TOKENS, TOKENS)
            return registers.load_at(ref, [at], tiled=True, interpret=interpret)[0]

        found = []
        for group in range(-(-self.lanes // 16)):
            row = ((4 * quarter & self.lanes - 1) + 16 * group) * self.bits
            rows = [[load(row + self.bits * lane + k) for lane in range(4)] for k in range(self.bits)]
            before = load(jnp.where(row == 0, self.dim * self.bits // 8, row) - 1)
            by_token = [*zip(*(_transposed(*four, interpret) for four in rows), strict=True)]
            firsts = [
                byte_permute(words[-1], before, 0x2104 + token, interpret=interpret)
                for token, words in enumerate(by_token)
            ]
            rings = [[first, *words] for first, words in zip(firsts, by_token, strict=True)]
            if self.lanes < 16:
                rings = [_aligned(ring, (self.bits * (quarter >> 1)).astype(jnp.uint32)) for ring in rings]
            found.append(rings)
        return found

    def value_indices(self, refs: Any, *, interpret: Any) -> list[list[Word]]:
        """Returns, by words of four tokens, the bytes with the windows of the thread's dimensions, from bit 0 on."""
        each, total = self.dim // 32, self.dim * self.bits // 8
        place = registers.threads(interpret=interpret) >> 2
        lane, part = place & self.lanes - 1, place >> self.lanes.bit_length() - 1
        start = self.bits * (8 * lane + each * part + 1) - WINDOW
        offsets = (self.bits * (each * np.arange(32 // self.lanes) + 1)) % 8
        count = -(-int(offsets.max() + (each - 1) * self.bits + WINDOW) // 8)
        rows = []
        for k in range(count):
            row = (start >> 3) + k
            row = jnp.where(row < 0, row + total, jnp.where(row < total, row, row - total))
            words = registers.load_words(refs[0], row, 0, interpret=interpret)
            rows.append(registers.split(words, interpret=interpret))
        rings = [[*ring] for ring in zip(*rows, strict=True)]
        shift = (start & 7).astype(jnp.uint32)
        return rings if not offsets.any() else [_aligned(ring, shift) for ring in rings]

    def value_tiles(
        self, indices: list[list[Word]], table: Any, *, paired: bool, interpret: Any
    ) -> Iterator[dict[int, list[jax.Array]]]:
        """Tiles of 64 dimensions by their numbers, see `in_order`, each as slices of tokens."""
        for tile in range(self.dim // SLICE):
            halves = (
                [self.levels(_window(ring, self.bits * each), interpret=interpret) for ring in indices]
                for each in (2 * tile, 2 * tile + 1)
            )
            stacked = (registers.stack(half, interpret=interpret) for half in halves)
            yield {tile: tensor_cores.fragments(*stacked, interpret=interpret)}

    def in_order(self, sums: jax.Array) -> jax.Array:
        """Sums (n, d, rows) in the order of tiles, by dimension."""
        row = np.arange(self.dim)
        place, each = 8 * (row // 16 % 4) + row % 8, self.dim // 32
        number = place // self.lanes * each + 2 * (row // SLICE) + row // 8 % 2
        return sums[:, np.argsort(number * self.lanes + place % self.lanes)]


def _each(byte: int) -> np.uint32:
    """Returns a word of four such bytes."""
    return np.uint32(byte * 0x01010101)


def _signs(words: Word, interpret: Any) -> Word:
    """Returns words with eight times the highest bit of each byte."""
    return byte_permute(words, words, 0xBA98, interpret=interpret)


def _transposed(a: Word, b: Word, c: Word, d: Word, interpret: Any) -> list[Word]:
    """Returns of four words the first bytes of all, the second ones, and so on."""
    permute = lambda x, y, selector: byte_permute(x, y, selector, interpret=interpret)  # noqa: E731
    pairs = [(permute(a, b, selector), permute(c, d, selector)) for selector in (0x5140, 0x7362)]
    return [permute(x, y, selector) for x, y in pairs for selector in (0x5410, 0x7632)]


def _window(ring: list[Word], start: int) -> Word:
    """The eight bits from bit `start` of bytes that follow on each other."""
    first, shift = divmod(start, 8)
    return _joined(ring[first], ring[first + 1], shift) if shift else ring[first]


def _aligned(ring: list[Word], shift: Word) -> list[Word]:
    """Bytes from bit `shift` of the first on, below 8; what comes after the last are zeros."""
    return [_joined(*pair, shift) for pair in zip(ring, [*ring[1:], jnp.zeros(THREADS, jnp.uint32)], strict=True)]


def _joined(low: Word, high: Word, shift: Any) -> Word:
    """Returns in each byte the bits of `low` from `shift` on, and above them the lowest bits of `high`'s byte."""
    kept = (np.uint32(255) >> (shift if isinstance(shift, jax.Array) else np.uint32(shift))) * _each(1)
    return (low >> shift & kept) | (high << (8 - shift) & ~kept)
