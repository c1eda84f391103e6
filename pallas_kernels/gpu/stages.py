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

from pallas_kernels.gpu.mosaic import load
from pallas_kernels.gpu.rows import Rows

Fields: TypeAlias = list[list[jax.Array]]
"""Numbers of consecutive lanes in each of the 8 planes."""


class Tile(NamedTuple):
    """A tile of tokens in memory, shared by the threads: each part of a token takes consecutive lanes."""

    rows: Rows
    dim: int

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
        return lax.fori_loop(0, own // self.width * times, lambda i, carry: step(first + i * self.width, carry), init)

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
    """Rotates in 3-blocks: 9 coefficients a lane for planes 0 to 2, 9 for planes 5 to 7.

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


def dense(tile: Tile, source: Any, matrix: Any, parts: list[Any], barrier: Any, target: Any) -> None:
    """Writes M x for each vector x of a tile of 64 into `target` in float32: tensor cores multiply bfloat16.

    `matrix` (2, d, d) holds M as the sum of two numbers of 8 bits, x is split in two likewise, and three products are
    added: 16 bits of both. `parts` is shared memory (`dense_rows`, d) for rows of either half.
    """
    source, target = tile.rows.flat(source), tile.rows.flat(target)
    columns = [pl.ds(k, 64) for k in range(0, tile.dim, 64)]
    size = dense_rows(tile.dim)

    def halves(x):
        high = x.astype(jnp.bfloat16)
        return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)

    def multiply(accumulator):
        for columns_k in columns:
            high, low = halves(load(source.at[:, columns_k], plgpu.Layout.WGMMA).astype(jnp.float32))
            for x, half in ((high, 0), (high, 1)) if source.dtype == jnp.bfloat16 else ((high, 0), (low, 0), (high, 1)):
                plgpu.wgmma(accumulator, x, parts[half].at[:, columns_k].T)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    def interpreted():  # which has no products with numbers in registers
        high, low = halves(source[...].astype(jnp.float32))
        first, second = (part[...].astype(jnp.float32).T for part in parts)
        return sum(a.astype(jnp.float32) @ b for a, b in ((high, first), (low, first), (high, second)))

    for first in range(0, tile.dim, size):
        rows = pl.ds(first, size)
        for half, part in enumerate(parts):
            plgpu.copy_gmem_to_smem(matrix.at[half, rows], part, barrier)
        plgpu.barrier_wait(barrier)
        if tile.rows.interpret:
            target[:, rows] = interpreted()
        else:
            target[:, rows] = pl.run_scoped(multiply, plgpu.ACC((64, size), jnp.float32))


def dense_rows(dim: int) -> int:
    """Rows of the matrix that are in shared memory at a time."""
    return 64 if dim <= 128 else 32


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
