"""Attention of one new token of each sequence to packed keys and values: Pallas Mosaic GPU, Hopper.

    scores[t]  = <y, keys[t]>,  keys[t] = scale[t] * levels[index[t]] + bias[t]
    weights[t] = exp(scores[t] - largest)
    sums       = weights @ values

All query heads of a key-value head are taken together. Both products run on tensor cores in exact integers. Keys and
transposed values are unpacked in registers to int8 levels. Their rows (tokens of keys, dimensions of values) are the M
of the product. Queries and weights are two int8 limbs, 15 bits. Scales and biases are folded into scores and weights.
The running softmax is that of Milakov & Gimelshein (2018). Blocks of threads share the tokens of a head
(FlashDecoding), and their sums are put together outside.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import registers, tensor_cores
from pallas_kernels.gpu.columns import Columns, Lookup
from pallas_kernels.gpu.registers import COLUMN, SLICE, TILE
from pallas_kernels.gpu.softmax_block import BLOCK, accumulated, scores_of, seen
from pallas_kernels.gpu.streams import Companded, Stream
from pallas_kernels.gpu.unpacking import Side
from pallas_kernels.packed import NEVER, UNIT, Packed, Sums, limbs

STAGES = 3
"""Blocks of tokens that are being copied or used."""
LOG2E = math.log2(math.e)


def decode_attention(
    y: jax.Array,
    keys: Packed,
    values: Packed,
    start: jax.Array,
    stop: jax.Array,
    shift: jax.Array | None = None,
    *,
    tables: jax.Array | None = None,
    dim: int | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: Any = False,
) -> Sums:
    """The softmax sums of queries over the tokens start[b] <= t < stop[b] of each sequence.

    Args:
      y: queries float32 (batch, heads, rows, d), scaled as the scores shall be; d is 64, 128 or 256, rows <= 16. For
        keys by `Lookup` (batch, heads, rows, columns + 1): the last column's level is always 1.
      keys, values: codes, each of 1 to 4 bits; groups are of a multiple of 64 dimensions. With `tables`, pages
        are in the place of sequences and T is 128.
      start, stop: int32 (batch,).
      shift: float32 (batch, heads, rows, 1 or T), added to the scores; one for each token only of keys by levels.
      tables: int32 (batch, T / 128), the pages in which tokens lie.
      dim: of the values, unless they are by `Lookup`; d, if not given.
      softcap: scores s become softcap tanh(s / softcap).
      splits: blocks of threads that share the tokens of a head; enough to fill a GPU, if not given.
      interpret: False, or what `mosaic.interpreter` returns.

    Returns:
      float32 (batch, heads, rows), (batch, heads, rows), (batch, heads, rows, dim); of values by `Lookup`
      (batch, heads, rows, columns + 1), as for y.
    """
    batch, heads, rows, _ = y.shape
    dim = y.shape[3] - isinstance(keys.levels, Lookup) if dim is None else dim
    plan = planned(keys, values, rows, tables=tables, dim=dim, softcap=softcap, splits=splits, interpret=interpret)
    shift = jnp.zeros((batch, heads, rows, 1)) if shift is None else shift
    y, shift = (jnp.pad(x * LOG2E, [(0, 0), (0, 0), (0, plan.rows - rows), (0, 0)]) for x in (y, shift))
    y, shift = (x.reshape(-1, plan.rows, x.shape[3]) for x in (y, shift))
    by_token, shift = (jnp.swapaxes(shift, 1, 2), jnp.zeros_like(shift)) if shift.shape[2] > 1 else (None, shift)
    start, stop = (jnp.repeat(bound.astype(jnp.int32), heads) for bound in (start, stop))
    if isinstance(plan.keys, Columns):
        y, groups = y[..., :-1], y[..., -1:]
    else:
        groups = y.reshape(*y.shape[:2], plan.keys.groups, -1).sum(-1)
    whole, unit = limbs(y)
    columns = jnp.stack([unit * plan.keys.unit, shift[..., 0], *jnp.moveaxis(groups, -1, 0)], axis=1)
    queries = Queries(whole, columns, start, stop)
    sums, largest, total = call(plan, queries, keys, values, plan.tables(keys, values), tables, by_token)

    weight = jnp.exp2(largest - largest.max(1, keepdims=True))
    total, sums = (total * weight).sum(1), (sums * weight[:, :, None]).sum(1)
    parts = largest.max(1) / LOG2E, total, jnp.swapaxes(plan.values.in_order(sums), 1, 2)
    return Sums(*(part.reshape(batch, heads, *part.shape[1:])[:, :, :rows] for part in parts))


class Queries(NamedTuple):
    """Queries as the kernel takes them, n = batch heads."""

    limbs: jax.Array
    """int8 (n, 2 rows, d), see `packed.limbs`, of queries times log2 e."""
    columns: jax.Array
    """float32 (n, 2 + groups, rows): the unit of the limbs, what is added to scores, and the sums of groups."""
    start: jax.Array
    """int32 (n,)."""
    stop: jax.Array
    """int32 (n,)."""


class Plan(NamedTuple):
    dim: int
    """Dimension of the values."""
    rows: int
    splits: int
    softcap: float | None
    keys: Side | Stream | Columns
    values: Side | Stream | Columns
    interpret: Any

    def tables(self, keys: Packed, values: Packed) -> tuple[jax.Array, jax.Array]:
        """Levels of keys and of values as the kernel reads them."""
        return self.keys.table(keys.levels), self.values.table(values.levels)


class _Arrays(NamedTuple):
    """Arrays of `Packed` that are read block by block; in the kernel their refs."""

    sections: tuple[Any, ...]
    scales: Any
    biases: Any


class _Operands(NamedTuple):
    """Operands that are read block by block."""

    keys: _Arrays
    values: _Arrays
    shift: Any
    """(n, T, rows), if it differs from token to token."""


def planned(
    keys: Packed,
    values: Packed,
    rows: int,
    *,
    tables: jax.Array | None,
    dim: int,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: Any = False,
) -> Plan:
    """Returns what is static of a call with so many queries a head; arguments are those of `decode_attention`."""
    (rooms, heads), tokens = keys.scales.shape[:2], keys.scales.shape[3]
    batch, blocks = (rooms, tokens // BLOCK) if tables is None else tables.shape
    splits = max(1, min(blocks // 8, -(-3 * 132 // (batch * heads)))) if splits is None else splits
    sides = _side(keys, tokens, UNIT, dim), _side(values, dim, dim, dim)
    dim = sides[1].dim if isinstance(sides[1], Columns) else dim
    return Plan(dim, -(-rows // 8) * 8, splits, None if softcap is None else softcap * LOG2E, *sides, interpret)


def _side(codes: Packed, rows: int, period: int, dim: int) -> Side | Stream | Columns:
    if isinstance(codes.levels, Lookup):
        return Columns(len(codes.levels.starts), codes.sections[0].shape[2])
    if isinstance(codes.levels, Companded):
        return Stream(dim, 8 * codes.sections[0].shape[2] // dim, codes.levels)
    bits = sum(8 * section.shape[-2] // rows for section in codes.sections)
    return Side(period, bits, codes.scales.shape[2], codes.biases is not None, codes.levels is not None or bits < 4)


def _flat(codes: Packed) -> _Arrays:
    """Keys as (n, T w / 8, d), values as (n, d w / 8, T), scales and biases as (n, groups, T), n = batch heads."""

    def flat(x):
        return None if x is None else x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    sections = tuple(lax.bitcast_convert_type(flat(section), jnp.int8) for section in codes.sections)
    return _Arrays(sections, flat(codes.scales), flat(codes.biases))


def call(plan, queries, keys, values, levels, pages=None, by_token=None):
    """The kernel. Its sums (n, splits, d, rows), largest scores and totals (n, splits, rows) are in base 2."""
    rows, interpret = plan.rows, plan.interpret
    limbs, columns, start, stop = queries
    key_table, value_table = levels
    operands = _Operands(_flat(keys), _flat(values), by_token)
    leaves, tree = jax.tree.flatten(operands)
    tables = [] if pages is None else [pages]

    def kernel(y_ref, columns_ref, start_ref, stop_ref, key_table, value_table, *refs):
        *pages_ref, sums_ref, largest_ref, total_ref, y_smem, weights_smem, tables_smem, barrier = refs
        pages_ref, blocks = pages_ref[: len(tables)], pages_ref[len(tables) :]
        n, split = lax.axis_index("n"), lax.axis_index("split")

        def copied(source, target):
            plgpu.copy_gmem_to_smem(source, target, barrier)
            plgpu.barrier_wait(barrier)
            return target

        def levels_of(table, smem):
            return copied(table.at[lax.rem(n, table.shape[0])], *smem) if smem else [table[k] for k in range(4)]

        copied(y_ref.at[n], y_smem)
        column = [registers.load(columns_ref.at[n, k], COLUMN, interpret=interpret) for k in range(columns.shape[1])]
        key_levels, value_levels = map(levels_of, (key_table, value_table), tables_smem)
        begin, end = start_ref[n], stop_ref[n]
        first, count = _share(begin, end, split, plan.splits)

        def step(indices, *arguments):
            *refs, carry = arguments
            key_refs, value_refs, shift = tree.unflatten([ref.at[0] for ref in refs])
            scores = scores_of(plan, key_refs, key_levels, y_smem, column, shift)
            token = (first + indices[0]) * BLOCK
            scores = [seen(plan, x, k, begin - token, end - token) for k, x in enumerate(scores)]
            return accumulated(plan, value_refs, value_levels, weights_smem, scores, carry)

        def at(i, token):
            """The block of an array whose tokens are on an axis."""
            return n, *((first + i) * (axis == token) for axis in (1, 2))

        def at_page(i, token):
            heads = limbs.shape[0] // len(pages)
            page = jnp.maximum(pages_ref[0][lax.div(n, heads), first + i], 0)
            return page * heads + lax.rem(n, heads), 0, 0

        def spec(x, token, *, coded=False, paged=bool(tables)):
            shape = [1, *x.shape[1:]]
            shape[token] = shape[token] if paged else BLOCK * x.shape[token] // tokens
            transforms = registers.tiling(shape[2]) if coded and shape[1] % 8 == 0 else ()
            index = functools.partial(at_page if paged else at, token=token)
            return plgpu.BlockSpec(tuple(shape), index, transforms=transforms)

        def specs(arrays, by_token):
            sections = [spec(x, by_token, coded=True) for x in arrays.sections]
            return sections + [spec(x, 2) for x in arrays[1:] if x is not None]

        keys, values, shift = operands
        tokens = keys.scales.shape[2] if shift is None else shift.shape[1]

        zeros = registers.full(jnp.float32(0), (SLICE, rows), TILE, interpret=interpret)
        biases = (zeros,) * (plan.values.groups if plan.values.biased else 0)
        carry = (
            registers.full(jnp.float32(NEVER / 2), (rows,), COLUMN, interpret=interpret),
            zeros,
            biases,
            (zeros,) * (plan.dim // SLICE),
        )
        pipeline = plgpu.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[
                *specs(keys, 1 if isinstance(plan.keys, Side) else 2),
                *specs(values, 2),
                *([] if shift is None else [spec(shift, 1, paged=False)]),
            ],
            max_concurrent_steps=STAGES,
            init_carry=carry,
        )
        largest, total, biases, sums = pipeline(*blocks)
        if isinstance(plan.values, Columns):
            registers.store(sums_ref.at[n, split, plan.dim], jnp.sum(biases[0], axis=0), interpret=interpret)
        for k, part in enumerate(sums):
            if isinstance(plan.values, Side) and biases:
                bias = jnp.sum(biases[k * len(biases) * SLICE // plan.dim], axis=0)
                part = part + lax.broadcast_in_dim(bias, part.shape, (1,))
            registers.store(sums_ref.at[n, split, pl.ds(SLICE * k, SLICE)], part, interpret=interpret)
        registers.store(largest_ref.at[n, split], largest, interpret=interpret)
        registers.store(total_ref.at[n, split], jnp.sum(total, axis=0), interpret=interpret)

    shapes = [(plan.dim + isinstance(plan.values, Columns), rows), (rows,), (rows,)]
    weights = plan.values.groups, 2 * rows, BLOCK
    of_sides = (plan.keys, key_table), (plan.values, value_table)
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((limbs.shape[0], plan.splits, *shape), jnp.float32) for shape in shapes],
        grid=(limbs.shape[0], plan.splits),
        grid_names=("n", "split"),
        scratch_types=[
            plgpu.SMEM(limbs.shape[1:], jnp.int8, transforms=tensor_cores.SLICES),
            [plgpu.SMEM(weights[1:], jnp.int8, transforms=tensor_cores.SLICES)] * weights[0],
            [[plgpu.SMEM(table.shape[1:], jnp.int8)] * isinstance(side, Columns) for side, table in of_sides],
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        kernel_name="decode_attention",
        interpret=interpret,
    )(limbs, columns, start, stop, key_table, value_table, *tables, *leaves)


def _share(begin, end, split, splits):
    """The first block of tokens, and their number, of one of `splits` shares."""
    first = begin // BLOCK
    blocks = jnp.where(end > begin, (end + BLOCK - 1) // BLOCK - first, 0)
    each = (blocks + splits - 1) // splits
    return first + split * each, jnp.clip(blocks - split * each, 0, each)
