"""Norms of the vectors of a tile, and the nearest levels of their coordinates."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rows import Rows
from pallas_kernels.stages import Tile


def norm(tile: Tile, ref: Any, partial: Any) -> jax.Array:
    """Euclidean norms. Coordinates are divided by a power of two near the largest, so that no square leaves float32."""
    largest = _over_coordinates(tile, ref, partial, jnp.maximum, jnp.abs)
    bits = lax.bitcast_convert_type(largest, jnp.uint32) & 0x7F800000
    bits = jnp.clip(bits, jnp.uint32(27 << 23), jnp.uint32(253 << 23))  # 2^-100 to 2^126
    unit = lax.bitcast_convert_type(bits, jnp.float32)
    inverse = lax.bitcast_convert_type(jnp.uint32(254 << 23) - bits, jnp.float32)
    square = _over_coordinates(tile, ref, partial, operator.add, lambda x: (x * inverse) * (x * inverse))
    return jnp.where(square > 0, square * lax.rsqrt(square), 0.0) * unit  # there is no square root


def _over_coordinates(tile: Tile, ref: Any, partial: Any, combine: Any, function: Any) -> jax.Array:
    """Combines what `function` makes of a token's coordinates, across the threads that share it."""
    rows = tile.rows

    def chunk(lane, total):
        return functools.reduce(combine, [function(x) for values in tile.read(ref, lane) for x in values], total)

    total = tile.over_lanes(chunk, rows.full(0.0))
    if rows.parts == 1:
        return total
    rows.poke(partial, rows.part, rows.token, [total])
    rows.synchronize()
    parts = [rows.peek(partial, rows.full(part, jnp.int32), rows.token)[0] for part in range(rows.parts)]
    rows.synchronize()
    return functools.reduce(combine, parts)


def nearest(rows: Rows, table: Any, bits: int, symmetric: bool, norm: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The function from a coordinate to the number of boundaries, times the norm, that lie below it.

    They are counted up to 4 bits, of symmetric ones only the positive against |x|; above 4 bits they are searched.
    """

    table = readable(rows, table)

    def above(x, boundary):
        return jnp.where(x > boundary, jnp.uint32(1), jnp.uint32(0))

    def count(x, boundaries):
        return functools.reduce(operator.add, [above(x, boundary) for boundary in boundaries], jnp.uint32(0))

    def search(x):
        index = rows.full(0, jnp.uint32)
        for bit in reversed(range(bits)):
            boundary = look_up(rows, table, index + jnp.uint32(2**bit - 1)) * norm
            index += above(x, boundary) << bit
        return index

    if bits > 4:
        return search
    half = 2 ** (bits - 1) - 1
    boundaries = [table[0, i] * norm for i in range(half + 1 if symmetric else 0, 2**bits - 1)]
    if not symmetric:
        return lambda x: count(x, boundaries)
    middle = jnp.uint32(half), jnp.uint32(half + 1)  # m ^ half is half - m, m ^ (half + 1) is half + 1 + m
    return lambda x: count(jnp.abs(x), boundaries) ^ jnp.where(x < 0, *middle)


def look_up(rows: Rows, table: Any, index: jax.Array) -> jax.Array:
    """table[0, index] of each thread; `table` is a `readable` one."""
    index = index.astype(jnp.int32)
    return table[0, index] if rows.interpret else rows.peek(table, rows.part * 0, index)[0]


def readable(rows: Rows, table: Any) -> Any:
    """A table in shared memory, or its numbers for the interpreter, which is slow at reading memory."""
    return table[...] if rows.interpret else table
