"""Norms of the vectors of a tile, and the nearest levels of their coordinates."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.rows import Rows
from pallas_kernels.gpu.stages import Tile


def norm(tile: Tile, ref: Any, m: Any) -> jax.Array:
    """Returns Euclidean norms.

    If a sum of squares leaves float32, or loses bits at its lower end, the coordinates are summed again, divided by a
    power of two near the largest.
    """
    rows = tile.rows
    square = _over_coordinates(tile, ref, m["partial"], operator.add, lambda x: x * x)
    unusual = (square < 2.0**-80) | ~(square < 2.0**120)
    zero = rows.full(0, jnp.int32)
    rows.poke(m["unusual"], zero, zero, [zero])
    rows.synchronize()
    rows.poke(m["unusual"], zero, zero, [zero + 1], unusual)
    rows.synchronize()
    times = m["unusual"][0, 0]

    def scaled():
        largest = _over_coordinates(tile, ref, m["partial"], jnp.maximum, jnp.abs, times)
        bits = lax.bitcast_convert_type(largest, jnp.uint32) & 0x7F800000
        bits = jnp.clip(bits, jnp.uint32(27 << 23), jnp.uint32(253 << 23))  # 2^-100 to 2^126
        unit = lax.bitcast_convert_type(bits, jnp.float32)
        inverse = lax.bitcast_convert_type(jnp.uint32(254 << 23) - bits, jnp.float32)
        again = _over_coordinates(tile, ref, m["partial"], operator.add, lambda x: (x * inverse) * (x * inverse), times)
        return square_root(again) * unit

    return jnp.where(unusual, scaled(), square_root(square))


def square_root(x: jax.Array) -> jax.Array:
    """Returns x rsqrt(x): kernels have no square root, but its inverse."""
    return jnp.where(x > 0, x * lax.rsqrt(x), 0.0)


def _over_coordinates(tile: Tile, ref: Any, partial: Any, combine: Any, function: Any, times: Any = 1) -> jax.Array:
    """Combines what `function` makes of a token's coordinates, across the threads that share it; `times` may be 0."""
    rows = tile.rows

    def chunk(lane, total):
        return functools.reduce(combine, [function(x) for values in tile.read(ref, lane) for x in values], total)

    return across(rows, partial, combine, tile.over_lanes(chunk, rows.full(0.0), times))


def across(rows: Rows, partial: Any, combine: Any, total: jax.Array) -> jax.Array:
    """Combines the numbers of the threads that share a token; `partial` is shared memory (parts, tokens)."""
    if rows.parts == 1:
        return total
    rows.poke(partial, rows.part, rows.token, [total])
    rows.synchronize()
    parts = [rows.peek(partial, rows.full(part, jnp.int32), rows.token)[0] for part in range(rows.parts)]
    rows.synchronize()
    return functools.reduce(combine, parts)


def nearest(rows: Rows, table: Any, bits: int, symmetric: bool, norm: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """The function from a coordinate to the number of boundaries, times the norm, that lie below it.

    Up to 4 bits the boundaries are counted; symmetric ones only on the positive side, against |x|. Above 4 bits they
    are searched.
    """

    table = readable(rows, table)

    def above(x, boundary):
        """1 where x > boundary: the sign of their difference, which is right however it is rounded."""
        return lax.bitcast_convert_type(boundary - x, jnp.uint32) >> 31

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
    half = 2 ** (bits - 1)
    boundaries = [table[0, i] * norm for i in range(half if symmetric else 0, 2 * half - 1)]
    if not symmetric:
        return lambda x: count(x, boundaries)

    def folded(x):
        """half + m for positive x, half - 1 - m for negative, of m boundaries below |x|."""
        negative = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) >> 31, jnp.uint32)
        return count(jnp.abs(x), boundaries) ^ jnp.uint32(half) ^ (negative & jnp.uint32(2 * half - 1))

    return folded


def fill_levels(rows: Rows, m: Any) -> None:
    """Makes the table of levels in shared memory, and that of the boundaries between them if there is one.

    Levels are rounded before their sums are: in registers a product and a sum would become one operation.
    """
    count, zero = m["levels"].shape[1], rows.part * 0
    step = rows.peek(m["step"], zero, zero)[0]
    rows.fill(m["table of levels"], count, lambda i: rows.peek(m["levels"], zero, i)[0].astype(jnp.float32) * step)
    rows.synchronize()
    if "table of boundaries" in m:
        levels = readable(rows, m["table of levels"])
        middle = lambda i: (look_up(rows, levels, i) + look_up(rows, levels, i + 1)) * 0.5  # noqa: E731
        rows.fill(m["table of boundaries"], count - 1, middle)


def look_up(rows: Rows, table: Any, index: jax.Array) -> jax.Array:
    """table[0, index] of each thread; `table` is a `readable` one."""
    index = index.astype(jnp.int32)
    return table[0, index] if rows.interpret else rows.peek(table, rows.part * 0, index)[0]


def readable(rows: Rows, table: Any) -> Any:
    """A table in shared memory, or its numbers for the interpreter, which is slow at reading memory."""
    return table[...] if rows.interpret else table
