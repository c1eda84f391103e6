"""Queries and a mean that turn with positions (rotary positions), in kernels of single threads."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.rows import STEP, Rows, spread

SPAN = 128
"""Positions of a span: each thread has one."""


class Angles(NamedTuple):
    """Angles by which queries and a mean turn: of the first r coordinates, i and i + r / 2 in the plane i.

    A position is that where its span begins and the rest. The first span begins behind the sinks.
    """

    begins: jax.Array
    """float32 (spans, r): cosines, then sines, of where spans begin."""
    within: jax.Array
    """float32 (sinks + `SPAN`, r): the same of the rests, from minus the sinks on, times the length of what turns."""
    fast: jax.Array
    """float32 (2 fast + terms, `SPAN`): cosines, then sines, of fast planes in a span, then polynomials."""
    slow: jax.Array
    """float32 (r - 2 fast, terms): coefficients of the polynomials for cosines, then sines, of the other planes."""


def turns_of(rows: Rows, begins: Any, within: Any, position: jax.Array, column: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the other column of the plane of each column, and by what both are multiplied to turn to a position
    behind the sinks."""
    count = begins.shape[1]
    half, span = count // 2, lax.div(jnp.maximum(position, 0), SPAN)
    plane = jnp.where(column < count, lax.rem(column, half), 0)

    def angle(ref, row):
        row = rows.full(row, jnp.int32)
        return [rows.block(ref, row, plane + start)[0][0] for start in (0, half)]

    (cos, sin), (own_cos, own_sin) = angle(begins, span), angle(within, position - span * SPAN + within.shape[0] - SPAN)
    cos, sin = cos * own_cos - sin * own_sin, sin * own_cos + cos * own_sin
    lower, turning = column < half, column < count
    partner = jnp.where(turning, jnp.where(lower, column + half, column - half), column)
    return partner, jnp.where(turning, cos, 1.0), jnp.where(turning, jnp.where(lower, -sin, sin), 0.0)


def inner_products(
    rows: Rows, y: Any, mean: Any, begins: Any, fast: Any, slow: Any, across: Any, both: Any, terms: Any
) -> Callable[[jax.Array], list[jax.Array]]:
    """Returns what computes products as `rqjax.Rope.inner`: of the rows of y with a mean (1, d) that turns to each
    thread's position in a span.

    In shared memory are y, (each, d), and room for what is turned, `both` (d, each) and `terms` (terms, each).
    """
    (each, dim), half, zero, thread = y.shape, begins.shape[1] // 2, rows.full(0, jnp.int32), rows.thread
    count = fast.shape[0] - terms.shape[0] >> 1
    planes = []
    for plane, there in spread(rows, half):
        (left, right), (y_left, y_right) = zip(*(
            (rows.block(mean, zero, plane + start)[0][0], [x for (x,) in rows.block(y, zero, plane + start, each)])
            for start in (0, half)
        ), strict=True)  # fmt: skip
        pairs = list(zip(y_left, y_right, strict=True))
        planes.append(
            (plane, there, [a * left + b * right for a, b in pairs], [b * left - a * right for a, b in pairs])
        )
    rest = [rows.full(0.0)] * each
    if 2 * half < dim:
        for column, there in spread(rows, dim):
            there = (column >= 2 * half) if there is None else there & (column >= 2 * half)
            factor = jnp.where(there, rows.block(mean, zero, column)[0][0], 0.0)
            rest = [s + x * factor for s, (x,) in zip(rest, rows.block(y, zero, column, each), strict=True)]
        rest = rows.over_threads(operator.add, rest, across)

    def of_span(span):
        rows.synchronize()  # all have read what is written now
        for plane, there, a, b in planes:
            row = rows.full(span, jnp.int32)
            cos, sin = (rows.block(begins, row, plane + start)[0][0] for start in (0, half))
            pairs = list(zip(a, b, strict=True))
            rows.poke(both, plane, zero, [a * cos + b * sin for a, b in pairs], there)
            rows.poke(both, plane + half, zero, [b * cos - a * sin for a, b in pairs], there)
        rows.synchronize()
        row, term = thread & (each - 1), jnp.minimum(lax.div(thread, each), terms.shape[0] - 1)
        sums = rows.full(0.0)
        for k, start in enumerate((count, half + count)):
            for first in range(0, half - count, STEP):
                size = min(STEP, half - count - first)
                x = rows.block(both, rows.full(start + first, jnp.int32), row, size)
                factors = rows.block(slow, rows.full(k * (half - count) + first, jnp.int32), term, size)
                sums = sum((a * b for (a,), (b,) in zip(x, factors, strict=True)), sums)
        rows.poke(terms, term, row, [sums], thread < each * terms.shape[0])
        rows.synchronize()
        found = rest
        parts = (both, 0, 0, count), (both, half, count, count), (terms, 0, 2 * count, terms.shape[0])
        for ref, start, at, size in parts:
            for first in range(0, size, STEP):
                step = min(STEP, size - first)
                x = rows.block(ref, rows.full(start + first, jnp.int32), zero, step, each)
                factors = rows.block(fast, rows.full(at + first, jnp.int32), thread, step)
                for of_rows, (factor,) in zip(x, factors, strict=True):
                    found = [s + a * factor for s, a in zip(found, of_rows, strict=True)]
        return found

    return of_span
