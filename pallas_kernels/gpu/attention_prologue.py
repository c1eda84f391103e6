"""Queries of one new token for the decode attention kernel, and their attention to tokens in full precision, at once.

A block of threads either rotates `ROWS` queries of a head by its matrix and splits them into limbs, or attends with
them to `SLOTS` tokens. All is float32 arithmetic of single threads: a matrix product of four rows is too small for
tensor cores to pay.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.decode_attention import LOG2E, Queries
from pallas_kernels.gpu.mosaic import LANE
from pallas_kernels.gpu.registers import THREADS
from pallas_kernels.gpu.rows import Rows
from pallas_kernels.gpu.softmax_block import MAGIC
from pallas_kernels.packed import LARGEST, NEVER

ROWS = 4
"""Queries of a block of threads."""
SLOTS = 64
"""Tokens in full precision of a block of threads."""
STEP = 32
"""Rows of a matrix that are on their way to a thread at once, while it multiplies as many others."""


class Window(NamedTuple):
    """Tokens of a cache that are in full precision, as `rqjax.KVCache` has them."""

    sinks: int
    window: int
    unit: int
    sliding: int | None


class Exact(NamedTuple):
    """Softmax sums in base 2 over blocks of tokens in full precision, of rows padded to a multiple of `ROWS`."""

    sums: jax.Array
    """float32 (n, blocks, rows, d), n = batch heads."""
    largest: jax.Array
    """float32 (n, blocks, rows)."""
    total: jax.Array
    """float32 (n, blocks, rows)."""


def prologue(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    held: jax.Array,
    matrix: jax.Array,
    sums_of: jax.Array,
    scale: jax.Array,
    mean: jax.Array | None,
    *,
    window: Window,
    padded: int,
    unit: float,
    softcap: float | None,
    interpret: Any = False,
) -> tuple[Queries, Exact]:
    """Runs the kernel.

    Args:
      q: (batch, 1, q_heads, d) in a float dtype, not scaled.
      keys, values: (batch, heads, slots, d) in a float dtype.
      lengths, held: int32 (batch,) of the cache, with the new token.
      matrix: float32 (1 or heads, d, columns), by which queries are multiplied from the right.
      sums_of: float32 (1 or heads, groups, d): vectors whose products with queries the kernel takes beside the limbs.
      scale: float32 (1,), of all scores.
      mean: float32 (batch, heads, d), whose products with queries are added to scores of codes.
      window: what is static of the tokens in full precision.
      padded: rows of the limbs, at least the queries of a head.
      unit: number of which the kernel's keys are multiples.
      softcap: as in `decode_attention`.
    """
    batch, heads, slots, dim = keys.shape
    n, each, columns, groups = batch * heads, q.shape[2] // heads, matrix.shape[2], sums_of.shape[1]
    size, chunks, of_queries = min(SLOTS, slots), -(-each // ROWS), padded // ROWS
    blocks, vectors = -(-slots // size), groups + (mean is not None)
    rows = Rows(THREADS, bool(interpret))
    operands = [q.reshape(n, each, dim), keys.reshape(n, slots, dim), values.reshape(n, slots, dim), lengths, held]
    operands += [matrix, sums_of, scale] + ([] if mean is None else [mean.reshape(n, 1, dim)])

    def kernel(*refs):
        q_ref, keys_ref, values_ref, lengths_ref, held_ref, matrix_ref, sums_of_ref, scale_ref, *refs = refs
        mean_ref = None if mean is None else refs.pop(0)
        limbs_ref, columns_ref, start_ref, stop_ref, sums_ref, largest_ref, total_ref, *memory = refs
        y, scores, weights, across = memory
        i, part = lax.axis_index("n"), lax.axis_index("part")
        thread = rows.thread
        zero = rows.full(0, jnp.int32)
        head, length = lax.rem(i, heads), lengths_ref[lax.div(i, heads)]
        passed = lax.div(jnp.maximum(length - window.sinks - window.window, 0), window.unit) * window.unit
        coded = jnp.maximum(passed, held_ref[lax.div(i, heads)])
        oldest = jnp.int32(0) if window.sliding is None else jnp.maximum(length - window.sliding, 0)

        def of_head(ref):
            return ref.at[head if ref.shape[0] > 1 else 0]

        def one(ref, *at):
            """Places of a single number, or of a single row, as a matrix."""
            return ref.at[(*at[:-1], pl.ds(at[-1], 1))]

        def read_queries(first):
            factor = scale_ref[0] * LOG2E
            for r in range(ROWS):
                for column, there in spread(rows, dim):
                    x = rows.block(q_ref.at[i], rows.full(jnp.minimum(first + r, each - 1), jnp.int32), column)[0][0]
                    x = jnp.where(rows.full(first + r, jnp.int32) < each, x.astype(jnp.float32) * factor, 0.0)
                    rows.poke(y, rows.full(r, jnp.int32), column, [x], there)
            rows.synchronize()

        @pl.when(part < of_queries)
        def _():
            first = part * ROWS
            read_queries(first)
            found = [(at, multiplied(rows, y, of_head(matrix_ref), at[0], dim)) for at in spread(rows, columns)]
            sizes, products = [zero.astype(jnp.float32)] * ROWS, [zero.astype(jnp.float32)] * (ROWS * vectors)
            for _, z in found:
                sizes = [jnp.maximum(size, jnp.abs(x)) for size, x in zip(sizes, z, strict=True)]
            for column, there in spread(rows, dim):
                factors = [rows.block(of_head(sums_of_ref), zero, column, groups)] if groups else []
                factors += [] if mean_ref is None else [rows.block(mean_ref.at[i], zero, column)]
                x = [one[0] for one in rows.block(y, zero, column, ROWS)]
                terms = [a * b[0] for part in factors for b in part for a in x]
                terms = terms if there is None else [jnp.where(there, term, 0.0) for term in terms]
                products = [total + term for total, term in zip(products, terms, strict=True)]
            sizes = [x * (1 / LARGEST) for x in rows.over_threads(jnp.maximum, sizes, across)]
            products = rows.over_threads(operator.add, products, across) if products else []
            for (column, there), z in found:
                whole = [x / jnp.where(size > 0, size, 1.0) + MAGIC for x, size in zip(z, sizes, strict=True)]
                whole = [lax.bitcast_convert_type(x, jnp.int32) for x in whole]
                for r, x in enumerate(whole):
                    for start, limb in ((first, x >> 7), (first + padded, x & 127)):
                        row = one(limbs_ref, i, start + r)
                        rows.poke(row, zero, column, [limb.astype(jnp.int8)], there)
            shift = products[groups * ROWS :] or [zero.astype(jnp.float32)] * ROWS
            for k, numbers in enumerate(
                [[x * unit for x in sizes], shift, *(products[ROWS * g : ROWS * (g + 1)] for g in range(groups))]
            ):
                place = columns_ref.at[i, pl.ds(k, 1), pl.ds(first, ROWS)]
                rows.poke(place, zero, zero, numbers, thread == 0)

            @pl.when(part == 0)
            def _():
                bound = jnp.clip(length - window.sinks, 0, coded)
                start = jnp.clip(oldest - window.sinks, 0, coded)
                for ref, number in ((start_ref, start), (stop_ref, bound)):
                    rows.poke(one(ref, i), zero, zero, [rows.full(number, jnp.int32)], thread == 0)

        @pl.when(part >= of_queries)
        def _():
            chunk, block = lax.div(part - of_queries, blocks), lax.rem(part - of_queries, blocks)
            first, own = chunk * ROWS, block * size
            begin = jnp.minimum(own, slots - size)  # the last block may reach back into the one before
            read_queries(first)
            _scores(rows, y, keys_ref.at[i], begin, size, scores)
            row, lane = thread >> 5, thread & 31
            found = []
            for at in range(0, size, 32):
                slot = lane + at + begin
                score = rows.block(scores, row, lane + at)[0][0]
                if softcap is not None:
                    score = softcap * jnp.tanh(score * (1 / softcap))
                token = _token(slot, length, coded, window, slots - window.sinks)
                seen = (token >= oldest) & (token >= 0) & (slot >= own) & (lane + at < size)
                found.append(jnp.where(seen, score, NEVER))
            largest = jnp.maximum(found[0], found[-1])
            largest = jnp.maximum(rows.over_lanes(jnp.maximum, largest), NEVER / 2)
            found = [jnp.exp2(x - largest) for x in found]
            for k, weight in enumerate(found):
                rows.poke(weights, lane + 32 * k, row, [weight])
            total = rows.over_lanes(operator.add, sum(found[1:], found[0]))
            for ref, number in ((largest_ref, largest), (total_ref, total)):
                place = ref.at[i, pl.ds(block, 1), pl.ds(first, ROWS)]
                rows.poke(place, zero, row, [number], lane == 0)
            rows.synchronize()
            for column, there in spread(rows, dim):
                sums = [zero.astype(jnp.float32)] * ROWS
                for at in range(0, size, STEP):
                    count = min(STEP, size - at)
                    x = rows.block(values_ref.at[i], rows.full(begin + at, jnp.int32), column, count)
                    w = rows.block(weights, rows.full(at, jnp.int32), zero, count, ROWS)
                    for (v,), of_row in zip(x, w, strict=True):
                        v = v.astype(jnp.float32)  # a token without a weight adds nothing, not even not-a-number
                        sums = [s + u * jnp.where(u != 0, v, 0.0) for s, u in zip(sums, of_row, strict=True)]
                for r, x in enumerate(sums):
                    rows.poke(one(sums_ref, i, block, first + r), zero, column, [x], there)

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct((n, *dims), dtype)

    float32, int32 = jnp.float32, jnp.int32
    out = [
        *(shape(jnp.int8, 2 * padded, columns), shape(float32, 2 + groups, padded), shape(int32, 1), shape(int32, 1)),
        shape(float32, blocks, chunks * ROWS, dim),
        *[shape(float32, blocks, chunks * ROWS)] * 2,
    ]
    limbs, numbers, start, stop, *exact = plgpu.kernel(
        kernel,
        out_type=out,
        grid=(n, of_queries + chunks * blocks),
        grid_names=("n", "part"),
        scratch_types=[
            plgpu.SMEM((ROWS, dim), float32),
            plgpu.SMEM((ROWS, SLOTS), float32),
            plgpu.SMEM((SLOTS, ROWS), float32),
            plgpu.SMEM((THREADS // 32, max(1, vectors) * ROWS), float32),
        ],
        compiler_params=LANE,
        kernel_name="attention_prologue",
        interpret=interpret,
    )(*operands)
    return Queries(limbs, numbers, start[:, 0], stop[:, 0]), Exact(*exact)


def spread(rows: Rows, count: int) -> list[tuple[jax.Array, jax.Array | None]]:
    """Columns of a matrix with `count` of them, one a thread at a time, and where there is one; None: everywhere.
    Other threads have the last."""
    thread = rows.thread
    whole = [(thread + start, None) for start in range(0, count - THREADS + 1, THREADS)]
    rest = thread + count // THREADS * THREADS
    return whole + ([(jnp.minimum(rest, count - 1), rest < count)] if count % THREADS else [])


def multiplied(rows: Rows, y: Any, matrix: Any, column: jax.Array, dim: int) -> list[jax.Array]:
    """Products of the rows of y, (`ROWS`, dim) in shared memory, with a column of a matrix (dim, n) for each thread.

    The next rows of the matrix are read while one multiplies: dim is a multiple of `STEP`.
    """
    zero = rows.full(0, jnp.int32)

    def read(i):
        return [x for (x,) in rows.block(matrix.at[pl.ds(i * STEP, STEP)], zero, column, STEP)]

    def step(i, carry):
        sums, numbers = carry
        following = read(jnp.minimum(i + 1, dim // STEP - 1))
        x = rows.block(y, zero, rows.full(i * STEP, jnp.int32), ROWS, STEP)
        for k, number in enumerate(numbers):
            sums = [total + of_row[k] * number for total, of_row in zip(sums, x, strict=True)]
        return sums, following

    return lax.fori_loop(0, dim // STEP, step, ([zero.astype(jnp.float32)] * ROWS, read(0)))[0]


def _scores(rows: Rows, y: Any, keys: Any, begin: jax.Array, size: int, scores: Any) -> None:
    """Writes products of the rows of y with keys from `begin` on, (slots, d), to `scores` (`ROWS`, `SLOTS`).

    Four neighboring threads share a token, so that they read 64 bytes of it together.
    """
    quarter, slot = rows.thread & 3, rows.thread >> 2
    slots = [slot + at for at in range(0, size, 32)]
    width, zero = 16 // keys.dtype.itemsize, rows.full(0, jnp.int32)
    sums = [[zero.astype(jnp.float32)] * ROWS for _ in slots]
    for start in range(0, keys.shape[1], 4 * width):
        column = quarter * width + start
        x = rows.block(y, zero, column, ROWS, width)
        for k, at in enumerate(slots):
            (numbers,) = rows.block(keys, jnp.minimum(at, size - 1) + begin, column, 1, width)
            for j, number in enumerate(numbers):
                number = number.astype(jnp.float32)
                sums[k] = [total + of_row[j] * number for total, of_row in zip(sums[k], x, strict=True)]
    for at, of_slot in zip(slots, sums, strict=True):
        whole = [rows.over_lanes(operator.add, x, 4) for x in of_slot]
        mine = whole[0]
        for r in range(1, ROWS):
            mine = jnp.where(quarter == r, whole[r], mine)
        rows.poke(scores, quarter, at, [mine])
    rows.synchronize()


def _token(slot: jax.Array, length: jax.Array, coded: jax.Array, window: Window, ring: int) -> jax.Array:
    """The token that each slot holds and no code does, -1 where there is none, as `KVCache.exact_tokens` returns it."""
    back = length - 1 - slot
    newest = slot + lax.div(jnp.maximum(back, 0), ring) * ring
    in_ring = jnp.where((back >= 0) & (newest >= window.sinks + coded), newest, -1)
    return jnp.where(slot < window.sinks, jnp.where(slot < length, slot, -1), in_ring)
