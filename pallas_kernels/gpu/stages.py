"""Rotations of a tile in shared memory, lane by lane: lane j has the coordinates j, L + j, ..., 7 L + j, L = d / 8."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import registers
from pallas_kernels.gpu.registers import THREADS
from pallas_kernels.gpu.rows import Rows

Fields: TypeAlias = list[list[jax.Array]]
"""Numbers of consecutive lanes in each of the 8 planes."""


class Tile(NamedTuple):
    """A tile of tokens in memory, shared by the threads: each part of a token takes consecutive lanes."""

    rows: Rows
    dim: int
    once: Any = 1
    """1, of which a compiler does not know: loops over lanes of one trip stay loops, which take fewer registers."""

    @property
    def lanes(self) -> int:
        return self.dim // 8

    @property
    def width(self) -> int:
        """Lanes that a thread takes at once: 16 bytes of float32 where they come out even, else 8."""
        return 4 if self.lanes % (4 * self.rows.parts) == 0 else 2

    def plane(self, k: int) -> tuple[int, int]:
        """Returns where plane k begins, and the number of lanes if it is a power of two, else 0."""
        return k * self.lanes, self.lanes if self.lanes & (self.lanes - 1) == 0 else 0

    def over_lanes(self, step: Callable[[jax.Array, Any], Any], init: Any, times: Any = 1) -> Any:
        """Folds `step` over the thread's lanes, the first of `width` at a time; `times` 0 leaves all out."""
        own = self.lanes // self.rows.parts
        first = self.rows.part * own
        trips = own // self.width * times * self.once
        return lax.fori_loop(0, trips, lambda i, carry: step(first + i * self.width, carry), init)

    def for_lanes(self, produce: Callable[[jax.Array], Fields], consume: Callable[[jax.Array, Fields], None]) -> None:
        """Hands what `produce` makes of some lanes to `consume`."""
        self.over_lanes(lambda lane, _: consume(lane, produce(lane)), None)

    def read(self, ref: Any, lane: jax.Array) -> Fields:
        return [_float32(self.rows.peek(ref, self.rows.token, lane, self.width, self.plane(k))) for k in range(8)]

    def write(self, ref: Any, lane: jax.Array, fields: Fields) -> None:
        for k, values in enumerate(fields):
            values = [value.astype(ref.dtype) for value in values]
            self.rows.poke(ref, self.rows.token, lane, values, at=self.plane(k))


def rotor(tile: Tile, ref: Any, coefficients: Any, lane: jax.Array) -> Fields:
    """Rotates in 3-blocks by `coefficients` (28, d / 8): 9 coefficients a lane for planes 0 to 2, 9 for planes 5 to 7.

    The planes 3 and 4 are a band with five coefficients a coordinate: its own and those of two neighbors on each side.
    """
    rows, width = tile.rows, tile.width
    c = [rows.peek(coefficients, rows.full(k, jnp.int32), lane, width) for k in range(28)]

    def plane(k):
        return _float32(rows.peek(ref, rows.token, lane, width, tile.plane(k)))

    def block(c, planes):
        x = [plane(k) for k in planes]
        return [[c[3 * a][i] * x[0][i] + c[3 * a + 1][i] * x[1][i] + c[3 * a + 2][i] * x[2][i] for i in range(width)]
                for a in range(3)]  # fmt: skip

    def band(c, k):
        around = [_float32(rows.peek(ref, rows.token, lane, width, (k * tile.lanes + at, 0))) for at in (-width, width)]
        x = [*around[0], *plane(k), *around[1]]
        terms = [[c[t][i] * x[width + i + t - 2] for i in range(width)] for t in range(5)]
        return [functools.reduce(operator.add, column) for column in zip(*terms, strict=True)]

    return [*block(c[:9], (0, 1, 2)), band(c[18:23], 3), band(c[23:], 4), *block(c[9:18], (5, 6, 7))]


def fill_coefficients(tile: Tile, arrays: list[Any], table: Any, *, inverse: bool) -> None:
    """Makes the coefficients (28, d / 8) that `rotor` takes: each thread those of one rotor.

    `arrays` are bivectors (d // 3, 3) and, if two coordinates are left over, the angle of their planar rotor, (1, 1).
    """
    rows, lanes = tile.rows, tile.lanes
    zero, count = rows.part * 0, arrays[0].shape[0]
    for first in range(0, 2 * lanes + -(-2 * lanes // 3), THREADS):
        i = rows.thread + first
        b = [jnp.where(i < count, rows.peek(arrays[0], jnp.minimum(i, count - 1), zero + k)[0], 0.0) for k in range(3)]
        if len(arrays) == 2:  # a planar rotor is one whose bivector has one coordinate
            b[0] = jnp.where(i == count, rows.peek(arrays[1], zero, zero)[0], b[0])
        matrix = _rotation_matrix(*([-x for x in b] if inverse else b))
        half, place = (i >= lanes).astype(jnp.int32), 3 * (i - 2 * lanes)
        for k in range(9):
            rows.poke(table, 9 * half + k, i - lanes * half, [matrix[k]], i < 2 * lanes)
        for a in range(3):  # the band has zeros around the rows of its blocks
            half = (place + a >= lanes).astype(jnp.int32)
            for t in range(5):
                value = matrix[3 * a + a + t - 2] if 0 <= a + t - 2 < 3 else rows.full(0.0)
                within = (place >= 0) & (place + a < 2 * lanes)
                rows.poke(table, 18 + 5 * half + t, place + a - lanes * half, [value], within)


def _rotation_matrix(b12: jax.Array, b13: jax.Array, b23: jax.Array) -> list[jax.Array]:
    """Returns I + sin(a)/a K + (1 - cos(a))/a^2 K^2 (Rodrigues) by rows, a the length of the bivector, K = [[0, b12,
    b13], [-b12, 0, b23], [-b13, -b23, 0]]."""
    square = b12 * b12 + b13 * b13 + b23 * b23
    angle = square * lax.rsqrt(square)
    angle = jnp.where(square > 1e-30, 0.5 * (angle + square / angle), 1e-15)  # one step of Newton's method
    sine, cosine = jnp.sin(0.5 * angle) / angle, jnp.cos(0.5 * angle)
    first, second = 2 * sine * cosine, 2 * sine * sine
    return [
        *(1 - second * (b12 * b12 + b13 * b13), first * b12 - second * b13 * b23, first * b13 + second * b12 * b23),
        *(-first * b12 - second * b13 * b23, 1 - second * (b12 * b12 + b23 * b23), first * b23 - second * b12 * b13),
        *(second * b12 * b23 - first * b13, -first * b23 - second * b12 * b13, 1 - second * (b13 * b13 + b23 * b23)),
    ]


def planes(tile: Tile, source: Any, signs: Any | None, target: Any) -> None:
    """Takes the Hadamard transform within each plane, not normalized, of the vectors times `signs` (1, d) if given."""
    rows, size = tile.rows, tile.lanes
    width = 4 if size % 4 == 0 else 2

    def plane(i, _):
        first = (rows.part * (8 // rows.parts) + i) * size
        x = []
        for at in range(0, size, width):
            part = _float32(rows.peek(source, rows.token, first + at, width))
            if signs is not None:
                part = [a * b for a, b in zip(part, rows.peek(signs, rows.part * 0, first + at, width), strict=True)]
            x += part
        x = hadamard(x)
        for at in range(0, size, width):
            rows.poke(target, rows.token, first + at, x[at : at + width])

    lax.fori_loop(0, 8 // rows.parts, plane, None)


def fill_signs(tile: Tile, signs: Any, table: Any) -> None:
    """Writes signs (1, d), whole numbers, in float32."""
    rows = tile.rows
    rows.fill(table, tile.dim, lambda i: rows.peek(signs, rows.part * 0, i)[0].astype(jnp.float32))


def butterflies(tile: Tile, ref: Any, signs: Any | None, lane: jax.Array) -> Fields:
    """Takes the Hadamard transform between the planes after `planes`, normalized, and times `signs` (1, d) if given."""
    x = tile.read(ref, lane)
    columns = [hadamard([x[k][i] for k in range(8)]) for i in range(tile.width)]
    scale = 1 / math.sqrt(tile.dim)
    fields = [[columns[i][k] * scale for i in range(tile.width)] for k in range(8)]
    if signs is None:
        return fields
    rows = tile.rows
    s = [rows.peek(signs, rows.part * 0, lane, tile.width, tile.plane(k)) for k in range(8)]
    return [[a * b for a, b in zip(*pair, strict=True)] for pair in zip(fields, s, strict=True)]


def dense(tile: Tile, source: Any, matrix: Any, parts: tuple[Any, Any], read: Callable[[], Any]) -> jax.Array:
    """Returns M x for each vector x of a tile of 64, in float32: tensor cores multiply bfloat16.

    M and x are sums of two numbers of 8 bits each, and three products are added: 16 bits of both. `parts` is shared
    memory for the halves of some columns of M; it has those of all columns, as `fill_halves` writes them, if it has
    room. `read()` is called when the vectors have been read.
    """
    rows, interpret = tile.rows, tile.rows.interpret
    source = rows.flat(source)
    products = ((0, 0), (0, 1)) if source.dtype == jnp.bfloat16 else ((0, 0), (1, 0), (0, 1))
    resident = parts[0].shape[1] == tile.dim

    def factors():
        for first in range(0, tile.dim, width := min(64, parts[0].shape[1])):
            if not resident:
                blocks = _blocks(tile, matrix, first, width)  # on their way while the products before are taken
                if not interpret and first:
                    plgpu.wgmma_wait(0)
                rows.synchronize()
                _store_halves(tile, parts, blocks)
                plgpu.commit_smem()
            start, inside = divmod(first, 64)  # fewer columns may be a part of a tile of shared memory
            x = registers.load(source.at[:, pl.ds(64 * start, 64)], registers.TILE, interpret=interpret)
            x = _halves(x[:, inside : inside + width])
            if first + width == tile.dim:
                plgpu.commit_smem()
                read()
            columns = pl.ds(first if resident else 0, width)
            yield from ((x[i], parts[j].at[:, columns]) for i, j in products)

    def multiply(accumulator):
        for x, part in factors():
            plgpu.wgmma(accumulator, x, part.T)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    if interpret:  # which has no products with numbers in registers
        return sum(x.astype(jnp.float32) @ part[...].astype(jnp.float32).T for x, part in factors())
    return pl.run_scoped(multiply, plgpu.ACC((64, tile.dim), jnp.float32))


def fill_halves(tile: Tile, matrix: Any, parts: tuple[Any, Any]) -> None:
    """Writes the halves of a matrix, if there is room for all columns."""
    if parts[0].shape[1] == tile.dim:
        for first in range(0, tile.dim, 64):
            some = tuple(part.at[:, pl.ds(first, 64)] for part in parts)
            _store_halves(tile, some, _blocks(tile, matrix, first, 64))
        plgpu.commit_smem()


def half_columns(dim: int, tiles: int) -> int:
    """Returns the columns of a matrix whose halves are in shared memory at a time: 64 KiB beside one tile, or 16."""
    return dim if tiles * dim**2 <= 2**14 else 2**12 // dim


def _blocks(tile: Tile, matrix: Any, first: int, width: int) -> list[jax.Array]:
    """Reads columns of a matrix, 64 rows at a time."""
    places = [(pl.ds(row, 64), pl.ds(first, width)) for row in range(0, tile.dim, 64)]
    return [registers.load(matrix.at[place], registers.TILE, interpret=tile.rows.interpret) for place in places]


def _store_halves(tile: Tile, parts: tuple[Any, Any], blocks: list[jax.Array]) -> None:
    for i, block in enumerate(blocks):
        for part, half in zip(parts, _halves(block), strict=True):
            registers.store(part.at[pl.ds(64 * i, 64)], half, interpret=tile.rows.interpret)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits numbers into two of 8 bits each, whose sum has their first 16 bits."""
    x = x.astype(jnp.float32)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def hadamard(x: list[jax.Array]) -> list[jax.Array]:
    """H_2 x ... x H_2 x F of the numbers, not normalized: F is the Hartley matrix of the odd factor of their count."""
    size = len(x)
    odd = size // (size & -size)
    if odd > 1:
        angle = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
        matrix = (np.cos(angle) + np.sin(angle)).astype(np.float32)
        groups = [x[i : i + odd] for i in range(0, size, odd)]
        x = [functools.reduce(operator.add, [float(m) * v for m, v in zip(row, group, strict=True)])
             for group in groups for row in matrix]  # fmt: skip
    stride = odd
    while stride < size:
        x = [x[i] + x[i + stride] if not i // stride % 2 else x[i - stride] - x[i] for i in range(size)]
        stride *= 2
    return x


def _float32(values: list[jax.Array]) -> list[jax.Array]:
    return [value.astype(jnp.float32) for value in values]
