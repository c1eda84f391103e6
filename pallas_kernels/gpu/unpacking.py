"""Packed codes in shared memory as tiles of levels in registers, int8, for products on tensor cores.

Codes lie in groups of L rows: the 16 tokens of a unit of keys, all d dimensions of transposed values. A byte holds w
bits of each of the rows i, i + L w / 8, i + 2 L w / 8, ... So the rows i and i + L / 2 are at the same place of a
byte's two nibbles, for w = 4, 2 and 1 alike. A thread that loads the bytes of one has the other in the same word. The
rest is the same for all numbers of bits: words with an index of up to 4 bits in each nibble.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu import registers, tensor_cores
from pallas_kernels.gpu.registers import ROW, SLICE, byte_permute
from pallas_kernels.packed import UNIT, WIDTHS

SIGNS, UPPER = np.uint32(0x80808080), np.uint32(0xF0F0F0F0)


class Side(NamedTuple):
    """Static facts about keys, or about values."""

    period: int
    """Rows that share bytes: UNIT, or the dimension."""
    bits: int
    groups: int
    """Groups of dimensions, each with scales of its own."""
    biased: bool
    tabled: bool
    """True if levels are looked up. If not, an index n of 4 bits becomes 16 (n - 8): it stays in the upper nibble."""

    @property
    def unit(self) -> float:
        """Number that tiles hold multiples of."""
        return 1.0 if self.tabled else 1 / 16

    def token(self, tile: int, row: jax.Array) -> tuple[int, jax.Array]:
        """Returns the token in a row of a tile of keys: the sum of a multiple of SLICE and a part that differs by
        row."""
        return SLICE * tile, row

    def numbers(self, ref: Any, tile: int, *, interpret: Any) -> jax.Array:
        """Returns numbers of the tokens in a tile of keys, (64,)."""
        return registers.load(ref.at[pl.ds(SLICE * tile, SLICE)], ROW, interpret=interpret)

    def table(self, levels: jax.Array | None) -> jax.Array:
        """The levels in 4 words of 4 bytes; those of 4 bits without their signs, see `_levels`."""
        middle = 2 ** (self.bits - 1)
        levels = jnp.arange(-middle, middle, dtype=jnp.int8) if levels is None else jnp.asarray(levels)
        levels = levels & 127 if self.bits == 4 else jnp.pad(levels, (0, 16 - 2 * middle))
        return lax.bitcast_convert_type(levels.reshape(4, 4), jnp.uint32)

    def key_tiles(self, refs: Any, table: Any, tokens: int, *, interpret: Any) -> Iterator[list[jax.Array]]:
        """Tiles of 64 tokens, each as slices of d, in the order of the tokens."""
        warp, index = _place(interpret)
        for unit in range(0, tokens // UNIT, 4):
            indices = self._indices(refs, warp, unit, index, 0, interpret)
            yield tensor_cores.fragments(*self._levels(indices, table, interpret), interpret=interpret)

    def value_indices(self, refs: Any, *, interpret: Any) -> list[tuple[jax.Array, ...]]:
        """Reads all that `value_tiles` needs of shared memory."""
        warp, index = _place(interpret)
        if self.period == SLICE:
            return [(self._indices(refs, 0, 0, 8 * warp + index, 0, interpret),)]
        rows = [16 * warp + index, 16 * warp + 8 + index]
        starts = range(0, self.period // 2, SLICE)
        return [tuple(self._indices(refs, 0, 0, row, start, interpret) for row in rows) for start in starts]

    def value_tiles(
        self, indices: list[tuple[jax.Array, ...]], table: Any, *, paired: bool, interpret: Any
    ) -> Iterator[dict[int, list[jax.Array]]]:
        """Tiles of 64 dimensions by their numbers, each as slices of tokens; if `paired`, two of a word at once.

        The lower nibbles are the dimensions below d / 2, the upper those from d / 2 on. If d = 64, both are in one
        tile, and `in_order` restores the order.
        """
        for number, words in enumerate(indices):
            levels = [self._levels(word, table, interpret) for word in words]
            if len(levels) == 1:
                yield {0: tensor_cores.fragments(*levels[0], interpret=interpret)}
            else:
                below, above = (
                    tensor_cores.fragments(*halves, interpret=interpret) for halves in zip(*levels, strict=True)
                )
                pair = {number: below, number + len(indices): above}
                yield from [pair] if paired else ({m: tile} for m, tile in pair.items())

    def in_order(self, sums: jax.Array) -> jax.Array:
        """Sums (n, d, rows) in the order of tiles, by dimension.

        If d = 64, the rows from 16 k on are 8 k to 8 k + 7, then these plus 32.
        """
        n, dim, rows = sums.shape
        return sums.reshape(n, 4, 2, 8, rows).swapaxes(1, 2).reshape(sums.shape) if dim == SLICE else sums

    def _indices(
        self, refs: Any, unit: Any, first_unit: int, index: jax.Array, first: int, interpret: Any
    ) -> jax.Array:
        """Indices of the rows i = first + index[t] and i + period / 2 in the nibbles of words of each thread t.

        Args:
          unit, first_unit: the rows are those of the unit first_unit + unit[t].
          index, first: `first` is a multiple of 64, index[t] is below 64.
        """
        found, below = jnp.uint32(0), 0
        for ref, width in zip(refs, WIDTHS[self.bits], strict=True):
            rows = self.period * width // 8
            row = unit * rows + (index & (rows - 1))
            shift = width * (first // rows + (index >> rows.bit_length() - 1))
            words = registers.load_words(ref, row, first_unit * rows + first % rows, shift, interpret=interpret)
            found |= (words & _each(2**width - 1)) << below
            below += width
        return found

    def _levels(self, indices: jax.Array, table: Any, interpret: Any) -> tuple[jax.Array, jax.Array]:
        """Levels of the lower and of the upper nibbles of words, as bytes.

        A lookup by `byte_permute` takes 8 levels, so 4 bits take two. An index of the other half finds 0, because
        `byte_permute` then repeats the sign bit, which these levels do not have. The signs follow from the indices.
        """
        if not self.tabled:
            return (indices << 4) & UPPER ^ SIGNS, indices & UPPER ^ SIGNS
        permute = lambda a, b, selector: byte_permute(a, b, selector, interpret=interpret)  # noqa: E731
        flipped = indices ^ _each(8)
        pairs = []
        for below in (0, 16):  # bytes 0 and 1, then 2 and 3: levels of a lower and an upper nibble by turns
            pair = permute(table[0], table[1], indices >> below)
            pairs.append(pair | permute(table[2], table[3], flipped >> below) if self.bits == 4 else pair)
        lower, upper = permute(*pairs, 0x6420), permute(*pairs, 0x7531)
        if self.bits == 4:
            lower, upper = lower | (flipped << 4 & SIGNS), upper | (flipped & SIGNS)
        return lower, upper


def _place(interpret: Any) -> tuple[jax.Array, jax.Array]:
    """The warp of each thread, and which of the first eight rows of its warp it has."""
    thread = registers.threads(interpret=interpret)
    return thread >> 5, (thread & 31) >> 2


def _each(nibble: int) -> np.uint32:
    """Returns a word of eight such nibbles."""
    return np.uint32(nibble * 0x11111111)
