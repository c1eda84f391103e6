"""Decode attention to keys or values by trellises or transform codes: the warps of a block multiply together.

Both products run on tensor cores in exact integers. Keys and transposed values are unpacked in registers to int8
levels. Their rows (tokens of keys, dimensions of values) are the M of the product. Queries and weights are two int8
limbs, 15 bits. Scales and biases are folded into scores and weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import registers, tensor_cores
from pallas_kernels.gpu.columns import Columns, Lookup
from pallas_kernels.gpu.operands import share
from pallas_kernels.gpu.registers import COLUMN, SLICE, TILE
from pallas_kernels.gpu.softmax_block import BLOCK, accumulated, scores_of, seen
from pallas_kernels.gpu.streams import Companded, Stream
from pallas_kernels.gpu.unpacking import Side
from pallas_kernels.packed import NEVER, UNIT, Packed

ROWS = 8
"""Number that the queries of a head are padded to a multiple of."""
STAGES = 3
"""Blocks of tokens that are being copied or used."""


def splits_of(plan: Any, heads: int, tokens: int) -> int:
    """Returns the shares of a head's tokens: enough to fill a GPU."""
    return max(1, min(tokens // BLOCK // 8, -(-3 * 132 // heads)))


def key_side(codes: Packed, dim: int, rows: int) -> Side | Stream | Columns:
    return _side(codes, codes.scales.shape[3], UNIT, dim)


def value_side(codes: Packed, dim: int, rows: int) -> Side | Stream | Columns:
    return _side(codes, dim, dim, dim)


def _side(codes: Packed, rows: int, period: int, dim: int) -> Side | Stream | Columns:
    if isinstance(codes.levels, Lookup):
        return Columns(len(codes.levels.starts), codes.sections[0].shape[2])
    if isinstance(codes.levels, Companded):
        return Stream(dim, 8 * codes.sections[0].shape[2] // dim, codes.levels)
    bits = sum(8 * section.shape[-2] // rows for section in codes.sections)
    return Side(period, bits, codes.scales.shape[2], codes.biases is not None, codes.levels is not None or bits < 4)


def call(plan, limbs, columns, start, stop, pages, key_table, value_table, operands):
    """The kernel. Its sums (n, splits, d, rows), largest scores and totals (n, splits, rows) are in base 2."""
    rows, interpret = plan.rows, plan.interpret
    if operands.shift is not None:
        operands = operands._replace(shift=jnp.swapaxes(operands.shift, 1, 2))
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
        first, count = share(begin, end, split, plan.splits, BLOCK)

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
            return pages_ref[0][lax.div(n, heads), first + i] * heads + lax.rem(n, heads), 0, 0

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
