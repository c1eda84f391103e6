"""Queries of one new token for the decode attention kernel, and their attention to tokens in full precision, at once.

A block of threads has `ROWS` queries of a head. It rotates them by its matrix and splits them into limbs, or attends
with them to `SLOTS` tokens, or multiplies them by a mean that turns with positions. All is float32 arithmetic of single
threads: a matrix product of four rows is too small for tensor cores to pay.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.decode_attention import LOG2E, Queries
from pallas_kernels.gpu.mosaic import LANE
from pallas_kernels.gpu.positions import SPAN, Angles, inner_products, turns_of
from pallas_kernels.gpu.registers import THREADS
from pallas_kernels.gpu.rows import STEP, Rows, Spread, spread
from pallas_kernels.gpu.turning import place_of
from pallas_kernels.packed import LARGEST, NEVER

ROWS = 4
"""Queries of a block of threads."""
SLOTS = 64
"""Tokens in full precision of a block of threads."""
MAGIC = 1.5 * 2**23
"""Float32 that rounds a smaller number added to it."""
SHARES = 32
"""Most blocks of threads that share the spans of a head."""


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
    group_sums: jax.Array | None,
    scale: jax.Array,
    mean: jax.Array | None,
    *,
    window: Window,
    padded: int,
    unit: float,
    softcap: float | None,
    turns: bool = False,
    angles: Angles | None = None,
    tokens: int = 0,
    interpret: Any = False,
) -> tuple[Queries, Exact, jax.Array | None]:
    """Runs the kernel.

    Args:
      q: (batch, 1, q_heads, d) in a float dtype, not scaled.
      keys, values: (batch, heads, slots, d) in a float dtype.
      lengths, held: int32 (batch,) of the cache, with the new token.
      matrix: float32 (1 or heads, d, columns), by which queries are multiplied from the right.
      group_sums: float32 (1 or heads, groups, d), whose products with queries are the sums of groups of columns; none
        if not given.
      scale: float32 (1,), of all scores.
      mean: float32 (batch, heads, d), whose products with queries are added to scores of codes. With `angles` it turns.
      window: what is static of the tokens in full precision.
      padded: rows of the limbs, at least the queries of a head.
      unit: number of which the kernel's keys are multiples.
      softcap: as in `decode_attention`.
      turns: True if keys turn, and the matrix is that of `turning.turned`.
      angles: turn queries to their positions, if given. Tokens in full precision have turned.
      tokens: that there is room for in codes, a multiple of `SPAN`; of a mean that turns alone.

    Returns:
      Queries, sums, and of a mean that turns what is added to scores, float32 (n, padded, tokens), written only for
      spans in which tokens are seen.
    """
    batch, heads, slots, dim = keys.shape
    n, each, columns = batch * heads, q.shape[2] // heads, matrix.shape[2]
    groups = 0 if group_sums is None else group_sums.shape[1]
    size, chunks = min(SLOTS, slots), -(-each // ROWS)
    turned_mean = mean is not None and angles is not None
    blocks, vectors = -(-slots // size), groups + (mean is not None and not turned_mean)
    spans = tokens // SPAN if turned_mean else 0
    shares, whole = min(SHARES, spans), chunks + chunks * blocks
    rows = Rows(THREADS, bool(interpret))
    operands = [q.reshape(n, each, dim), keys.reshape(n, slots, dim), values.reshape(n, slots, dim), lengths, held]
    operands += [matrix, scale] + ([] if group_sums is None else [group_sums])
    operands += [] if mean is None else [mean.reshape(n, 1, dim)]
    operands += [] if angles is None else [angles.begins, angles.within]
    operands += [angles.fast, angles.slow] if turned_mean else []

    def kernel(*refs):
        q_ref, keys_ref, values_ref, lengths_ref, held_ref, matrix_ref, scale_ref, *refs = refs
        groups_ref = None if group_sums is None else refs.pop(0)
        mean_ref = None if mean is None else refs.pop(0)
        turn_refs = None if angles is None else [refs.pop(0) for _ in range(2)]
        span_refs = [refs.pop(0) for _ in range(2)] if turned_mean else []
        vectors_ref, columns_ref, start_ref, stop_ref, sums_ref, largest_ref, total_ref, *refs = refs
        shift_ref = refs.pop(0) if turned_mean else None
        y, scores, weights, across, *of_spans = refs
        i, part = lax.axis_index("n"), lax.axis_index("part")
        thread = rows.thread
        zero, nothing = rows.full(0, jnp.int32), [rows.full(0.0)] * ROWS
        head, length = lax.rem(i, heads), lengths_ref[lax.div(i, heads)]
        passed = lax.div(jnp.maximum(length - window.sinks - window.window, 0), window.unit) * window.unit
        coded = jnp.maximum(passed, held_ref[lax.div(i, heads)])
        oldest = jnp.int32(0) if window.sliding is None else jnp.maximum(length - window.sliding, 0)
        position = jnp.maximum(length - 1, 0) - window.sinks
        start, stop = (jnp.clip(bound - window.sinks, 0, coded) for bound in (oldest, length))

        def of_head(ref):
            return ref.at[head if ref.shape[0] > 1 else 0]

        def one(ref, *at):
            """Places of a single number, or of a single row, as a matrix."""
            return ref.at[(*at[:-1], pl.ds(at[-1], 1))]

        def read_queries(first):
            factor = scale_ref[0] * LOG2E
            for column, there in spread(rows, dim):
                turn = None if turn_refs is None else turns_of(rows, *turn_refs, position, column)
                for r in range(ROWS):
                    row = rows.full(jnp.minimum(first + r, each - 1), jnp.int32)
                    x = rows.block(q_ref.at[i], row, column)[0][0].astype(jnp.float32)
                    if turn is not None:
                        partner, cos, sin = turn
                        x = x * cos + rows.block(q_ref.at[i], row, partner)[0][0].astype(jnp.float32) * sin
                    x = jnp.where(rows.full(first + r, jnp.int32) < each, x * factor, 0.0)
                    rows.poke(y, rows.full(r, jnp.int32), column, [x], there)
            rows.synchronize()

        def write_vector(row, column, x, there):
            if turns:
                rows.poke(vectors_ref.at[i], *place_of(rows.full(row, jnp.int32), column, dim), [x], there)
            else:
                x = lax.bitcast_convert_type(x + MAGIC, jnp.int32)
                for start, limb in ((row, x >> 7), (row + padded, x & 127)):
                    rows.poke(one(vectors_ref, i, start), zero, column, [limb.astype(jnp.int8)], there)

        def write_queries(first, found, numbers):
            """Writes numbers of `ROWS` queries: vectors by column, and one a query for each row of `columns_ref`."""
            for (column, there), of_rows in zip(spread(rows, columns), found, strict=True):
                for r, x in enumerate(of_rows):
                    write_vector(first + r, column, x, there)
            for k, x in enumerate(numbers):
                rows.poke(columns_ref.at[i, pl.ds(k, 1), pl.ds(first, ROWS)], zero, zero, x, thread == 0)

        @pl.when(part < chunks)
        def _():
            multiply = multiplier(rows, of_head(matrix_ref), spread(rows, columns), dim)
            read_queries(part * ROWS)
            found, sizes, products = multiply(y), nothing, nothing * vectors
            for (column, _), z in zip(spread(rows, columns), found, strict=True):
                # Queries of the first rows of a product, which are behind the others, are as long as these.
                own = [jnp.where(column < dim, jnp.abs(x), 0.0) if turns else jnp.abs(x) for x in z]
                sizes = [jnp.maximum(size, x) for size, x in zip(sizes, own, strict=True)]
            for column, there in spread(rows, dim):
                factors = [] if groups_ref is None else rows.block(of_head(groups_ref), zero, column, groups)
                factors += rows.block(mean_ref.at[i], zero, column) if vectors > groups else []
                x = [number for (number,) in rows.block(y, zero, column, ROWS)]
                terms = [a * factor for (factor,) in factors for a in x]
                terms = terms if there is None else [jnp.where(there, term, 0.0) for term in terms]
                products = [total + term for total, term in zip(products, terms, strict=True)]
            sizes = [x * (1 if turns else 1 / LARGEST) for x in rows.over_threads(jnp.maximum, sizes, across)]
            products = rows.over_threads(operator.add, products, across) if products else []
            by_vector = [products[k : k + ROWS] for k in range(0, len(products), ROWS)]
            shift = by_vector.pop() if vectors > groups else nothing
            found = [[x / jnp.where(size > 0, size, 1.0) for x, size in zip(z, sizes, strict=True)] for z in found]
            write_queries(part * ROWS, found, [[x * unit for x in sizes], shift, *by_vector])

            @pl.when(part == 0)
            def _():
                for first in range(chunks * ROWS, padded, ROWS):
                    write_queries(first, [nothing] * len(found), [nothing] * (2 + groups))
                for ref, number in ((start_ref, start), (stop_ref, stop)):
                    rows.poke(one(ref, i), zero, zero, [rows.full(number, jnp.int32)], thread == 0)

        @pl.when((part >= chunks) & (part < whole))
        def _():
            chunk, block = lax.div(part - chunks, blocks), lax.rem(part - chunks, blocks)
            first, own = chunk * ROWS, block * size
            begin = jnp.minimum(own, slots - size)  # the last block may reach back into the one before
            score = _scores(rows, keys_ref.at[i], begin, size)
            read_queries(first)
            score(y, scores)
            columns = spread(rows, dim)
            ahead = _read(rows, values_ref.at[i], begin, size, columns[0][0])
            rows.synchronize()
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
                rows.poke(ref.at[i, pl.ds(block, 1), pl.ds(first, ROWS)], zero, row, [number], lane == 0)
            rows.synchronize()
            for k, (column, there) in enumerate(columns):
                x = ahead if k == 0 else _read(rows, values_ref.at[i], begin, size, column)
                for r, sums in enumerate(_weighted(rows, weights, x)):
                    rows.poke(one(sums_ref, i, block, first + r), zero, column, [sums], there)

        def turn_mean():
            first, share = lax.div(part - whole, shares) * ROWS, lax.rem(part - whole, shares)
            read_queries(first)
            inner = inner_products(rows, y, mean_ref.at[i], turn_refs[0], *span_refs, across, *of_spans)

            def step(k, _):
                span = lax.div(start, SPAN) + share + k * shares
                for r, x in enumerate(inner(span)):
                    rows.poke(shift_ref.at[i, pl.ds(first + r, 1)], zero, span * SPAN + thread, [x])
                return 0

            behind = lax.div(stop + SPAN - 1, SPAN) - lax.div(start, SPAN) - share
            lax.fori_loop(0, lax.div(jnp.maximum(behind + shares - 1, 0), shares), step, 0)

        if turned_mean:
            pl.when(part >= whole)(turn_mean)

    def shape(dtype, *dims):
        return jax.ShapeDtypeStruct((n, *dims), dtype)

    float32, int32 = jnp.float32, jnp.int32
    out = [
        shape(float32, padded * columns // 128, 128) if turns else shape(jnp.int8, 2 * padded, columns),
        *(shape(float32, 2 + groups, padded), shape(int32, 1), shape(int32, 1)),
        shape(float32, blocks, chunks * ROWS, dim),
        *[shape(float32, blocks, chunks * ROWS)] * 2,
        *[shape(float32, padded, SPAN * spans)] * turned_mean,
    ]
    memory = [(dim, ROWS), (angles.slow.shape[1], ROWS)] if turned_mean else []
    found, numbers, start, stop, sums, largest, total, *shift = plgpu.kernel(
        kernel,
        out_type=out,
        grid=(n, whole + chunks * shares),
        grid_names=("n", "part"),
        scratch_types=[
            plgpu.SMEM((ROWS, dim), float32),
            plgpu.SMEM((ROWS, SLOTS), float32),
            plgpu.SMEM((SLOTS, ROWS), float32),
            plgpu.SMEM((THREADS // 32, max(vectors, 1) * ROWS), float32),
            *(plgpu.SMEM(shape, float32) for shape in memory),
        ],
        compiler_params=LANE,
        kernel_name="attention_prologue",
        interpret=interpret,
    )(*operands)
    queries = Queries(found, numbers, start[:, 0], stop[:, 0])
    return queries, Exact(sums, largest, total), shift[0] if shift else None


def multiplier(rows: Rows, matrix: Any, columns: list[Spread], dim: int) -> Callable[[Any], list[list[jax.Array]]]:
    """Begins to read a matrix (dim, n), and returns the product with it: of y, (`ROWS`, dim) in shared memory, for each
    of the columns. The next rows of the matrix are read while one multiplies: dim is a multiple of `STEP`."""
    step = 2 * STEP if len(columns) == 1 and dim % (2 * STEP) == 0 else STEP
    last, zero = dim // step - 1, rows.full(0, jnp.int32)

    def read(k):
        part = matrix.at[pl.ds(k * step, step)]
        return [[x for (x,) in rows.block(part, zero, column, step)] for column, _ in columns]

    ahead = read(0)

    def multiply(y):
        def add(k, sums, numbers):
            x = rows.block(y, zero, rows.full(k * step, jnp.int32), ROWS, step)
            for j in range(step):
                sums = [
                    [s + a[j] * of_column[j] for s, a in zip(some, x, strict=True)]
                    for some, of_column in zip(sums, numbers, strict=True)
                ]
            return sums

        def pass_on(k, carry):
            sums, numbers = carry
            following = read(k + 1)
            return add(k, sums, numbers), following

        sums, numbers = lax.fori_loop(0, last, pass_on, ([[rows.full(0.0)] * ROWS for _ in columns], ahead))
        return add(last, sums, numbers)

    return multiply


def _scores(rows: Rows, keys: Any, begin: jax.Array, size: int) -> Callable[[Any, Any], None]:
    """Reads keys from `begin` on, (slots, d), and returns what writes their products with the rows of y, in shared
    memory, to (`ROWS`, `SLOTS`) there.

    Four neighboring threads share a token, so that they read 64 bytes of it together.
    """
    quarter, slots = rows.thread & 3, [(rows.thread >> 2) + at for at in range(0, size, 32)]
    width, zero = 16 // keys.dtype.itemsize, rows.full(0, jnp.int32)
    columns = [quarter * width + start for start in range(0, keys.shape[1], 4 * width)]
    places = [jnp.minimum(slot, size - 1) + begin for slot in slots]
    numbers = [[rows.block(keys, place, column, 1, width)[0] for place in places] for column in columns]

    def write(y, scores):
        sums = [[rows.full(0.0)] * ROWS for _ in slots]
        for column, by_slot in zip(columns, numbers, strict=True):
            x = rows.block(y, zero, column, ROWS, width)
            for k, of_slot in enumerate(by_slot):
                for j, number in enumerate(of_slot):
                    number = number.astype(jnp.float32)
                    sums[k] = [total + of_row[j] * number for total, of_row in zip(sums[k], x, strict=True)]
        for slot, of_slot in zip(slots, sums, strict=True):
            whole = [rows.over_lanes(operator.add, x, 4) for x in of_slot]
            own = whole[0]
            for r in range(1, ROWS):
                own = jnp.where(quarter == r, whole[r], own)
            rows.poke(scores, quarter, slot, [own])

    return write


def _read(rows: Rows, values: Any, begin: jax.Array, size: int, column: jax.Array) -> list[jax.Array]:
    """Reads a column of `size` values, (slots, d), from `begin` on."""
    return [x for (x,) in rows.block(values, rows.full(begin, jnp.int32), column, size)]


def _weighted(rows: Rows, weights: Any, values: list[jax.Array]) -> list[jax.Array]:
    """Sums of values by weights (`SLOTS`, `ROWS`) in shared memory. A value without a weight adds nothing, not even
    not-a-number, for which all is done again."""
    zero = rows.full(0, jnp.int32)

    def sums(chosen):
        found = [rows.full(0.0)] * ROWS
        for w, v in zip(rows.block(weights, zero, zero, len(values), ROWS), values, strict=True):
            v = v.astype(jnp.float32)
            found = [s + u * chosen(u, v) for s, u in zip(found, w, strict=True)]
        return found

    found = sums(lambda u, v: v)
    spoiled = jnp.where(sum(found[1:], found[0]) * 0 == 0, 0, 1)
    careful = lambda: sums(lambda u, v: jnp.where(u != 0, v, 0.0))  # noqa: E731
    return lax.cond(jnp.max(spoiled) == 0, lambda: found, careful)


def _token(slot: jax.Array, length: jax.Array, coded: jax.Array, window: Window, ring: int) -> jax.Array:
    """The token that each slot holds and no code does, -1 where there is none, as `KVCache.exact_tokens` returns it."""
    back = length - 1 - slot
    newest = slot + lax.div(jnp.maximum(back, 0), ring) * ring
    in_ring = jnp.where((back >= 0) & (newest >= window.sinks + coded), newest, -1)
    return jnp.where(slot < window.sinks, jnp.where(slot < length, slot, -1), in_ring)
