"""Codes that keys and values share (multi-head latent attention), in the decode attention kernel of warps.

A key is coordinates of its own and, behind them, the value. Codes of both lie as values do. A product with keys needs
neighboring dimensions of a token in a register, so four words of four tokens are transposed. Sums of values would take
more registers than a warp has. So each warp has scores of its own tokens, but values of its own dimensions for all
tokens: warps exchange maxima and weights in shared memory.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.levels import PAGE, SLICE, Factor, Levels, Place
from pallas_kernels.gpu.operands import Arrays, Plan
from pallas_kernels.gpu.registers import byte_permute
from pallas_kernels.gpu.rings import factors_of
from pallas_kernels.gpu.warp_softmax import LARGEST, TILE, Carry, add, over_tokens, tree, weighed, zeros
from pallas_kernels.gpu.warps import Word

WARPS = registers.THREADS // 32
DIMS, VALUE_DIMS = (64, 128), (128, 256, 512)
"""Dimensions of a key before its value, and of values."""


class Latents(Levels):
    """Static facts about codes that lie as values, whether they are keys, values or both."""

    def ordered(self, y: jax.Array) -> jax.Array:
        """Puts dimensions (.., d) in the order in which `query_words` loads them: 16 of each thread are neighbors."""
        parts = y.reshape(*y.shape[:-1], 2, self.dim // SLICE, 2, 4, 4)
        return jnp.einsum("...hpmqk->...pqmhk", parts).reshape(y.shape)

    def token(self, run: int, pair: int, i: int) -> int:
        """Number among TOKENS of a row of a sum of `key_factors`."""
        return 4 * run + 2 * pair + i

    @property
    def parts(self) -> int:
        return self.dim // SLICE

    def key_factors(
        self, sections: list[Any], table: Any, part: Any, run: int, place: Place
    ) -> Iterator[tuple[Any, list[Factor]]]:
        """Yields the number of a part's right side, and factors for it, of four tokens in pairs."""
        rows: list[list[Word]] = [[], [], [], []]
        for first in (32 * part, 32 * part + 16):
            for row, word in zip(rows, self._by_token(sections, first, run, place), strict=True):
                row += self._by_nibble(word, table, place.interpret)
        yield part, factors_of(rows)

    def _by_token(self, sections: list[Any], first: Any, run: int, place: Place) -> list[Word]:
        """Indices of four tokens: in the nibbles of each word four dimensions, and those d / 2 above."""

        def load(refs: Any, width: int) -> list[Word]:
            rows, columns, words = self.dim * width // 8, refs[0].shape[-1], []
            for row in (4 * place.q + k & (rows - 1) for k in range(4)):
                offset = registers.swizzled(row, place.key, columns, PAGE) + (first & (rows - 1)) * columns + 8 * run
                words += warps.load(refs, offset, 1, half=place.half, tiled=True, interpret=place.interpret)
            turn = (first if rows >= 16 else first + 4 * place.q) >> rows.bit_length() - 1
            return words if width == 4 else [word >> (width * turn).astype(jnp.uint32) for word in words]

        permute = lambda a, b, selector: byte_permute(a, b, selector, interpret=place.interpret)  # noqa: E731
        a, b, c, d = self._indices(sections, load)
        halves = [(permute(a, b, selector), permute(c, d, selector)) for selector in (0x5140, 0x7362)]
        return [permute(*pair, selector) for pair in halves for selector in (0x5410, 0x7632)]

    def value_factors_of(self, sections: list[Any], table: Any, first: int, warp: Any, place: Place) -> list[Factor]:
        """Factors of 32 of the own dimensions, see `dimension_of`, for the tokens of a warp."""
        own, page = self.dim // 2 // WARPS * place.warp, warp >> 1
        there = place._replace(part=warp & 1, half=None if place.half is None else place.half * 0 + page)

        def row(r: int) -> list[Word]:
            def load(refs: Any, width: int) -> list[Word]:
                rows, columns = self.dim * width // 8, refs[0].shape[-1]
                offset = registers.swizzled(place.row, there.value, columns, PAGE) + (own & (rows - 1)) * columns
                offset = offset + (first + 8 * r) * columns + (8 * PAGE * page if place.half is None else 0)
                words = warps.load(refs, offset, 4, half=there.half, tiled=True, interpret=place.interpret)
                turn = (width * (own >> rows.bit_length() - 1)).astype(jnp.uint32)
                return words if width == 4 else [word >> turn for word in words]

            return self._indices(sections, load)

        return self.left([row(r) for r in range(2)], table, interpret=place.interpret)

    def dimension_of(self, number: int, place: Place) -> jax.Array:
        """Dimension of a sum of the warp, but for `Place.row`."""
        return self.dimension(number) + self.dim // 2 // WARPS * place.warp


class Exchange(NamedTuple):
    """Shared memory in which warps exchange what they found of their tokens."""

    ref: Any
    """uint32 (`rows`, 128): right sides by tiles and warps, then a number of each query and warp."""
    place: Place

    @staticmethod
    def rows(tiles: int) -> int:
        return WARPS * tiles + 1

    def reduced(self, function: Any, numbers: list[jax.Array]) -> list[jax.Array]:
        """Reduces numbers of the queries of tiles over all warps."""
        interpret, first = self.place.interpret, 512 * WARPS * len(numbers) + 4 * self.place.q
        for t, x in enumerate(numbers):
            warps.store(self.ref, first + 64 * self.place.warp + 16 * t, [x], interpret=interpret)
        plgpu.commit_smem()
        found = []
        for t in range(len(numbers)):
            words = [warps.load(self.ref, first + 64 * k + 16 * t, 1, interpret=interpret)[0] for k in range(WARPS)]
            found.append(tree(function, [lax.bitcast_convert_type(word, jnp.float32) for word in words]))
        return found

    def put(self, rights: list[list[Word]]) -> None:
        """Stores right sides of the products of the warp's tokens with values, by tiles."""
        for t, right in enumerate(rights):
            warps.store(self.ref, self._right(self.place.warp, t), right, interpret=self.place.interpret)
        plgpu.commit_smem()

    def right(self, warp: int, tile: int) -> list[Word]:
        """Returns a right side of a warp's tokens."""
        return warps.load(self.ref, self._right(warp, tile), 4, interpret=self.place.interpret)

    def _right(self, warp: Any, tile: int) -> Any:
        return 512 * (WARPS * tile + warp) + (self.place.lane << 4)


def accumulated(
    plan: Plan,
    arrays: Arrays,
    table: Any,
    scores: list[list[jax.Array]],
    mask: list[jax.Array],
    masks: list[list[jax.Array]],
    carry: Carry,
    exchange: Exchange,
) -> Carry:
    """`warp_softmax.accumulated` with the sums of the warp's own dimensions."""
    side, interpret, place, tiles = plan.values, plan.interpret, exchange.place, range(len(scores))
    weights = weighed(plan, arrays, scores, mask, masks, carry, place, functools.partial(exchange.reduced, jnp.maximum))
    exchange.put([right for ((right,),) in weights.rights])
    sums = [list(some) for some in carry.sums]
    count = WARPS - 1 - table[-1].astype(jnp.int32)  # that is WARPS, as the compiler does not know: it stays a loop
    for i in range(side.dim // 32 // WARPS):

        def of_warp(warp: Any, found: Any, first: int = 16 * i) -> Any:
            factors, products = side.value_factors_of(arrays.sections, table, first, warp, place), []
            for t in tiles:
                right = exchange.right(warp, t)
                products += [(2 * t + f.total, f.words, right[f.first : f.first + 2]) for f in factors]
            return warps.multiply_add(found, products, interpret=interpret)

        found = lax.fori_loop(0, count, of_warp, zeros(2 * len(tiles), interpret))
        for t in tiles:
            add(side, sums[t], weights.kept[t], [4 * i, 4 * i + 2], found[2 * t : 2 * t + 2])
            sums[t][4 * i : 4 * i + 4] = warps.settled(sums[t][4 * i : 4 * i + 4], interpret=interpret)
    return Carry(weights.largest, weights.total, carry.biases, tuple(map(tuple, sums)))


def write(plan: Plan, carry: Carry, out: list[Any], exchange: Exchange) -> None:
    """Writes the sums of all warps."""
    interpret, place = plan.interpret, exchange.place
    sums_ref, largest_ref, total_ref = out
    totals = exchange.reduced(jnp.add, [over_tokens(jnp.add, x, interpret) for x in carry.total])
    for t, total in enumerate(totals):
        offset = 4 * (TILE * t + place.q)
        for k, x in enumerate(carry.sums[t]):
            dim = plan.values.dimension_of(k, place) + place.row
            x = x * (plan.values.unit / LARGEST)
            warps.store(sums_ref, 4 * plan.rows * dim + offset, [x], interpret=interpret)
        warps.store(largest_ref, offset, [carry.largest[t]], interpret=interpret)
        warps.store(total_ref, offset, [total], interpret=interpret)
