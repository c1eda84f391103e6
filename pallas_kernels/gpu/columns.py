"""Codes of columns with bits and levels of their own in shared memory as tiles of levels in registers, int8.

As in `streams`, the codes of a vector are a ring of bits. The ring's bytes are rows, and tokens lie side by side. An
index is up to eight bits of the ring, from any bit on, and its level is looked up in shared memory. The places of both
are looked up too: they differ by thread, and one kernel serves all allocations of bits. The indices of four neighboring
tokens are the bytes of a word. Rows are swizzled only if 8 divides their number, since a tile has eight.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import registers, tensor_cores
from pallas_kernels.gpu.registers import SLICE, byte_permute
from pallas_kernels.gpu.streams import TOKENS, Stream, Word

PART = 128
"""Columns of keys that are multiplied at once; more would take too many registers."""
MAX_ROWS, MAX_SIZE = 256, 2**15 - 2**12
"""Rows of a ring, and bytes of levels, that fit into `Columns.table`."""


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
    """Columns, at most 512."""
    rows: int
    """Bytes of the ring."""
    groups = 1
    biased = True
    """True, with the scale as the bias: one more column has the level 1."""
    unit = 1.0
    """Number that tiles hold multiples of."""

    token, numbers = Stream.token, Stream.numbers

    def table(self, lookup: Lookup) -> jax.Array:
        """int8 (1 or heads, n, 128): the levels, and after them two words of each column, which `_indices` reads."""
        starts, widths, places = (jnp.asarray(x, jnp.int32) for x in lookup[:3])
        if self.rows > MAX_ROWS or lookup.levels.shape[1] > MAX_SIZE:
            raise ValueError(f"expected rings and levels of at most {MAX_ROWS} and {MAX_SIZE} bytes")
        low, high = (self._row((starts // 8 + k) % self.rows) for k in range(2))
        used, kept = (1 << widths) - 1, 255 >> starts % 8
        where = low | starts % 8 | high << 16
        how = used & kept | (used & ~kept) << 8 | (places & 255) << 16 | places >> 8 << 24
        words = lax.bitcast_convert_type(jnp.stack([where, how]), jnp.int8).reshape(1, -1, 128)
        levels = jnp.asarray(lookup.levels).reshape(len(lookup.levels), -1, 128)
        return jnp.concatenate([levels, jnp.broadcast_to(words, (len(levels), *words.shape[1:]))], axis=1)

    def key_tiles(self, refs: Any, table: Any, tokens: int, *, interpret: Any) -> Iterator[list[jax.Array]]:
        """Tiles of 64 tokens, see `token`, each as slices of columns: all tiles of some columns, then of the next."""
        assert tokens == TOKENS
        thread, part = registers.threads(interpret=interpret), PART if self.dim % PART == 0 else SLICE
        for start in range(0, self.dim, part):
            by_group = []
            for group in range(start, start + part, 16):
                columns = [4 * (thread & 3) + (group + each) for each in range(4)]
                found = self._indices(refs[0], table, columns, [thread & -4], interpret)
                levels = [registers.look_up(table, *each, interpret=interpret)[0] for each in found]
                by_group.append([_joined(*four, interpret) for four in zip(*levels, strict=True)])
            for tile in range(TOKENS // SLICE):
                halves = ([words[2 * tile + half] for words in by_group] for half in range(2))
                yield _tile(halves, interpret)

    def value_indices(self, refs: Any, *, interpret: Any) -> Any:
        """Returns the refs: `value_tiles` is the first to read."""
        return refs

    def value_tiles(
        self, indices: Any, table: Any, *, paired: bool, interpret: Any
    ) -> Iterator[dict[int, list[jax.Array]]]:
        """Tiles of 64 columns by their numbers, each as slices of tokens."""
        thread = registers.threads(interpret=interpret)
        place, tokens = thread >> 2, [4 * (thread & 3) ^ 16 * k for k in range(TOKENS // 16)]
        first = (place >> 3 << 4) + (place & 7)
        for tile in range(self.dim // SLICE):
            columns = [first + (SLICE * tile + 8 * half) for half in range(2)]
            halves = (
                [_joined(*four, interpret) for four in registers.look_up(table, *each, interpret=interpret)]
                for each in self._indices(indices[0], table, columns, tokens, interpret)
            )
            yield {tile: _tile(halves, interpret)}

    def in_order(self, sums: jax.Array) -> jax.Array:
        """Sums (n, columns + 1, rows) in the order of tiles, by column."""
        return sums

    def _row(self, row: jax.Array) -> jax.Array:
        """Returns the address where a row begins: the byte of its column k is at this xor k."""
        return 128 * row | (row & 7) << 4 if self.rows % 8 == 0 else 128 * row

    def _indices(
        self, ref: Any, table: Any, columns: list[jax.Array], tokens: list[jax.Array], interpret: Any
    ) -> list[tuple[list[Word], Word]]:
        """Returns for each column a word of indices per four tokens, and where in the table index 0 is."""
        start = table.shape[0] * 128 - 8 * self.dim
        places = [start + 4 * (column + k * self.dim) for column in columns for k in range(2)]
        words, found = registers.load_at(table, places, interpret=interpret), []
        for where, how in zip(words[::2], words[1::2], strict=True):
            shift = where & 7
            kept, more, first = (byte_permute(how, how, each, interpret=interpret) for each in (0x0000, 0x1111, 0x2222))
            places = [row ^ token.astype(jnp.uint32) for token in tokens for row in (where & 0xFFF0, where >> 16)]
            loaded = registers.load_at(ref, places, tiled=self.rows % 8 == 0, interpret=interpret)
            pairs = zip(loaded[::2], loaded[1::2], strict=True)
            indices = [(low >> shift & kept) | (high << 8 - shift & more) | first for low, high in pairs]
            found.append((indices, byte_permute(how, how, 0xBB3B, interpret=interpret)))
        return found


def _joined(a: Word, b: Word, c: Word, d: Word, interpret: Any) -> Word:
    """The lowest bytes of four words."""
    pairs = (byte_permute(*pair, 0x0040, interpret=interpret) for pair in ((a, b), (c, d)))
    return byte_permute(*pairs, 0x5410, interpret=interpret)


def _tile(halves: Iterator[list[Word]], interpret: Any) -> list[jax.Array]:
    return tensor_cores.fragments(*(registers.stack(half, interpret=interpret) for half in halves), interpret=interpret)
