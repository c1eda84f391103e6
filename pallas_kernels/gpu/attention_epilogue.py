"""Output of attention from the softmax sums of the decode attention kernel and of tokens in full precision, at once.

A block of threads merges the sums of `ROWS` queries of a head, rotates them back by its matrix, and divides.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.attention_prologue import ROWS, Exact, multiplier
from pallas_kernels.gpu.decode_attention import LOG2E
from pallas_kernels.gpu.mosaic import LANE
from pallas_kernels.gpu.registers import THREADS
from pallas_kernels.gpu.rows import Rows, spread
from pallas_kernels.packed import NEVER

PARTS = 8
"""Splits, or blocks of tokens in full precision, whose sums are on their way to a thread at once."""


def epilogue(
    sums: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    exact: Exact,
    matrix: jax.Array,
    sinks: jax.Array | None,
    *,
    shape: tuple[int, ...],
    dtype: Any,
    interpret: Any = False,
) -> jax.Array:
    """Runs the kernel.

    Args:
      sums, largest, total: (n, splits, columns, padded), (n, splits, padded) twice, in base 2, n = batch heads.
      exact: sums of the tokens in full precision.
      matrix: float32 (1 or heads, columns rounded up to a multiple of `STEP`, d): sums are multiplied by it from the
        left.
      sinks: (q_heads,) scores of one more token, whose value is zero.
      shape: (batch, 1, q_heads, d) of the output.
      dtype: of the output.
    """
    n, splits, columns, padded = sums.shape
    heads, each, dim, rounded = n // shape[0], shape[2] * shape[0] // n, shape[3], matrix.shape[1]
    blocks = exact.sums.shape[1]
    rows = Rows(THREADS, bool(interpret))
    operands = [sums.reshape(n, splits * columns, padded), largest, total]
    operands += [exact.sums.reshape(n, -1, dim), exact.largest, exact.total, matrix]
    operands += [] if sinks is None else [sinks[None]]

    def kernel(*refs):
        sums_ref, largest_ref, total_ref, exact_ref, exact_largest_ref, exact_total_ref, matrix_ref, *refs = refs
        sinks_ref = None if sinks is None else refs.pop(0)
        out_ref, y, weights, across = refs
        i, first = lax.axis_index("n"), lax.axis_index("chunk") * ROWS
        head, zero = lax.rem(i, heads), rows.full(0, jnp.int32)
        column_of = rows.full(first, jnp.int32)

        def parts(ref, other, start):
            """Numbers of `ROWS` queries, a split or block a thread at a time."""
            for at, there in spread(rows, ref.shape[1]):
                numbers = rows.block(ref.at[i], at, column_of, 1, ROWS)[0]
                yield at + start, there, numbers if there is None else [jnp.where(there, x, other) for x in numbers]

        def added(found, start, x):
            """Sums with those of the parts from `start` on added."""
            w = rows.block(weights, rows.full(start, jnp.int32), zero, len(x), ROWS)
            for a, b in zip(w, x, strict=True):
                found = [f + u * v for f, u, v in zip(found, a, b, strict=True)]
            return found

        def begun(read, parts, start):
            """Begins to read sums of some parts, and returns what adds them all; `start` is the first one's weight."""
            rest = parts % PARTS
            ahead = read(parts - rest, rest) if rest else []

            def add(found):
                found = added(found, start + parts - rest, ahead) if rest else found
                some = lambda j, found: added(found, start + PARTS * j, read(PARTS * j, PARTS))  # noqa: E731
                return lax.fori_loop(0, parts // PARTS, some, found) if parts >= PARTS else found

            return add

        def of_splits(column):
            place = jnp.minimum(column, columns - 1)
            return lambda k, count: rows.block(sums_ref.at[i], place + k * columns, column_of, count, ROWS, columns)

        def of_blocks(column):
            def read(k, count):
                places = [column_of + (k + j) * exact.sums.shape[2] for j in range(count)]
                return [[x for (x,) in rows.block(exact_ref.at[i], place, column, ROWS)] for place in places]

            return read

        # All is read as soon as its place is known, since memory is what one waits for.
        scores = [*parts(largest_ref, NEVER, 0), *parts(exact_largest_ref, NEVER, splits)]
        totals = [*parts(total_ref, 0.0, 0), *parts(exact_total_ref, 0.0, splits)]
        of_codes, of_output = spread(rows, rounded), spread(rows, dim)
        adding = [begun(of_splits(column), splits, 0) for column, _ in of_codes]
        multiply = multiplier(rows, matrix_ref.at[head if matrix.shape[0] > 1 else 0], of_output, rounded)
        adding_exact = [begun(of_blocks(column), blocks, splits) for column, _ in of_output]

        tops = scores[0][2]
        for _, _, numbers in scores[1:]:
            tops = [jnp.maximum(top, x) for top, x in zip(tops, numbers, strict=True)]
        tops, own = rows.over_threads(jnp.maximum, tops, across), []
        if sinks_ref is not None:
            places = [rows.full(head * each + jnp.minimum(first + r, each - 1), jnp.int32) for r in range(ROWS)]
            own = [rows.block(sinks_ref, zero, place)[0][0].astype(jnp.float32) * LOG2E for place in places]
            tops = [jnp.maximum(top, x) for top, x in zip(tops, own, strict=True)]
        whole = [rows.full(0.0)] * ROWS
        for (at, there, numbers), (_, _, of_part) in zip(scores, totals, strict=True):
            factors = [jnp.exp2(x - top) for x, top in zip(numbers, tops, strict=True)]
            rows.poke(weights, at, zero, factors, there)
            whole = [a + x * factor for a, x, factor in zip(whole, of_part, factors, strict=True)]
        whole = rows.over_threads(operator.add, whole, across)
        whole = [x + jnp.exp2(score - top) for x, score, top in zip(whole, own, tops, strict=True)] if own else whole
        inverse = [1.0 / jnp.where(x > 0, x, 1.0) for x in whole]

        for (column, there), add in zip(of_codes, adding, strict=True):
            for r, x in enumerate(add([rows.full(0.0)] * ROWS)):
                x = jnp.where(column < columns, x, 0.0) if rounded > columns else x
                rows.poke(y, rows.full(r, jnp.int32), column, [x], there)
        rows.synchronize()
        for (column, there), add, found in zip(of_output, adding_exact, multiply(y), strict=True):
            for r, (x, factor) in enumerate(zip(add(found), inverse, strict=True)):
                row, mine = jnp.minimum(first + r, each - 1), rows.full(first + r, jnp.int32) < each
                mine = mine if there is None else mine & there
                rows.poke(out_ref.at[i, pl.ds(row, 1)], zero, column, [(x * factor).astype(dtype)], mine)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((n, each, dim), dtype),
        grid=(n, -(-each // ROWS)),
        grid_names=("n", "chunk"),
        scratch_types=[
            plgpu.SMEM((ROWS, rounded), jnp.float32),
            plgpu.SMEM((splits + blocks, ROWS), jnp.float32),
            plgpu.SMEM((THREADS // 32, ROWS), jnp.float32),
        ],
        compiler_params=LANE,
        kernel_name="attention_epilogue",
        interpret=interpret,
    )(*operands)
    return out.reshape(shape)
