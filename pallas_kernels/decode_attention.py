"""Attention of one new token of each sequence to packed keys and values: Pallas Mosaic GPU, Hopper.

    scores[t]  = <y, keys[t]>,  keys[t] = scale[t] * levels[index[t]] + bias[t]
    weights[t] = exp(scores[t] - largest)
    sums       = weights @ values

All query heads of a key-value head are taken together. Both products run on tensor cores in exact integers: keys and
transposed values are unpacked in registers to levels in int8, whose rows (tokens of keys, dimensions of values) are
the M of the product; queries and weights are two int8 limbs, 15 bits. Scales and biases are folded into scores and
weights. The running softmax is that of Milakov & Gimelshein (2018); blocks of threads share the tokens of a head
(FlashDecoding) and their sums are put together outside.

Codes lie in groups of L rows: 16 tokens of keys, all d dimensions of values. A byte holds w bits of each of the rows
i, i + L w / 8, i + 2 L w / 8, ... So in a byte the rows i and i + L / 2 are at the same place of the two nibbles, for
w = 4, 2 and 1 alike, and a thread that loads the bytes of one has the other in the same word.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import registers
from pallas_kernels.registers import COLUMN, ROW, SLICE, TILE, byte_permute

BLOCK = 128
"""Tokens of a step."""
UNIT = 16
"""Tokens of keys that share bytes."""
DIMS = (64, 128, 256)
MAX_ROWS = 16
"""Queries of one key-value head."""
WIDTHS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,)}
"""Bits of each array of codes, the lowest bits of an index first."""
STAGES = 3
"""Blocks of tokens that are on their way or in use."""
LARGEST = 127 * 128
"""Of the numbers that two limbs hold."""
NEVER = -1e30
"""The score of a token that is not seen."""
MAGIC = 1.5 * 2**23
"""A float32 to which a smaller number is added ends in the bits of that number, rounded to a whole one."""
SIGNS = np.uint32(0x80808080)
LOG2E = math.log2(math.e)


class Packed(NamedTuple):
    """Codes of keys, or of values, of T tokens; T is a multiple of BLOCK."""

    sections: tuple[jax.Array, ...]
    """uint8, one for each of WIDTHS: (batch, heads, T / UNIT, UNIT w / 8, d) of keys, (batch, heads, d w / 8, T) of
    values."""
    scales: jax.Array
    """(batch, heads, groups, T) in a float dtype: group g is of the dimensions from g d / groups on."""
    biases: jax.Array | None
    """As `scales`."""
    levels: jax.Array | None
    """int8 (2**bits,); of 4 bits the lower half is negative, the upper is not. None: index n is level
    n - 2**(bits - 1), and biases are those of index 0."""


class Sums(NamedTuple):
    """Of some tokens: the largest score, the sum of exp(score - largest), and that of the values so weighted."""

    largest: jax.Array
    total: jax.Array
    values: jax.Array


def decode_attention(
    y: jax.Array,
    keys: Packed,
    values: Packed,
    start: jax.Array,
    stop: jax.Array,
    shift: jax.Array | None = None,
    *,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: Any = False,
) -> Sums:
    """The softmax sums of queries over the tokens start[b] <= t < stop[b] of each sequence.

    Args:
      y: queries float32 (batch, heads, rows, d), scaled as the scores shall be; rows <= MAX_ROWS, d in DIMS.
      keys, values: codes, each of 1 to 4 bits; groups are of a multiple of 64 dimensions.
      start, stop: int32 (batch,).
      shift: float32 (batch, heads, rows), added to the scores.
      softcap: scores s become softcap tanh(s / softcap).
      splits: blocks of threads that share the tokens of a head; enough to fill a GPU, if not given.
      interpret: False, or what `mosaic.interpreter` returns.

    Returns:
      float32 (batch, heads, rows), (batch, heads, rows), (batch, heads, rows, d).
    """
    batch, heads, rows, dim = y.shape
    blocks = keys.scales.shape[3] // BLOCK
    splits = max(1, min(blocks // 8, -(-3 * 132 // (batch * heads)))) if splits is None else splits
    padded = -(-rows // 8) * 8
    shift = jnp.zeros((batch, heads, rows)) if shift is None else shift
    y, shift = (jnp.pad(x, [(0, 0), (0, 0), (0, padded - rows)] + [(0, 0)] * (x.ndim - 3)) for x in (y, shift))
    y, shift = (y * LOG2E).reshape(-1, padded, dim), (shift * LOG2E).reshape(-1, padded)
    start, stop = (jnp.repeat(bound.astype(jnp.int32), heads) for bound in (start, stop))

    sides = [_side(codes, period) for codes, period in ((keys, UNIT), (values, dim))]
    plan = _Plan(dim, padded, splits, None if softcap is None else softcap * LOG2E, *sides, interpret)
    limbs, unit = _limbs(y)
    groups = y.reshape(*y.shape[:2], plan.keys.groups, -1).sum(-1)
    columns = jnp.stack([unit * plan.keys.unit, shift, *jnp.moveaxis(groups, -1, 0)], axis=1)
    tables = (_table(codes, side.bits) for codes, side in zip((keys, values), sides, strict=True))
    sums, largest, total = _call(plan, limbs, columns, start, stop, *tables, _flat(keys), _flat(values))

    weight = jnp.exp2(largest - largest.max(1, keepdims=True))
    total, sums = (total * weight).sum(1), (sums * weight[:, :, None]).sum(1)
    if dim == SLICE:  # see `_value_tiles`
        sums = sums.reshape(-1, 4, 2, 8, padded).swapaxes(1, 2).reshape(-1, dim, padded)
    parts = largest.max(1) / LOG2E, total, jnp.swapaxes(sums, 1, 2)
    return Sums(*(part.reshape(batch, heads, *part.shape[1:])[:, :, :rows] for part in parts))


class _Side(NamedTuple):
    """What is static of keys, or of values."""

    period: int
    """Rows that share bytes."""
    bits: int
    groups: int
    biased: bool
    tabled: bool
    """Whether levels are looked up. If not, they stay in the upper nibbles of bytes: 16 times themselves."""

    @property
    def unit(self) -> float:
        return 1.0 if self.tabled else 1 / 16


class _Plan(NamedTuple):
    dim: int
    rows: int
    splits: int
    softcap: float | None
    keys: _Side
    values: _Side
    interpret: Any


class _Arrays(NamedTuple):
    """Of `Packed`, what is read block by block; in the kernel its refs."""

    sections: tuple[Any, ...]
    scales: Any
    biases: Any


def _side(codes: Packed, period: int) -> _Side:
    bits = sum(8 * section.shape[-2] // period for section in codes.sections)
    return _Side(period, bits, codes.scales.shape[2], codes.biases is not None, codes.levels is not None or bits < 4)


def _flat(codes: Packed) -> _Arrays:
    """Keys as (n, T w / 8, d), values as (n, d w / 8, T), scales and biases as (n, groups, T), n = batch heads."""

    def flat(x):
        return None if x is None else x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    sections = tuple(lax.bitcast_convert_type(flat(section), jnp.int8) for section in codes.sections)
    return _Arrays(sections, flat(codes.scales), flat(codes.biases))


def _table(codes: Packed, bits: int) -> jax.Array:
    """The levels in 4 words of 4 bytes; those of 4 bits without their signs, see `_levels`."""
    middle = 2 ** (bits - 1)
    levels = jnp.arange(-middle, middle, dtype=jnp.int8) if codes.levels is None else jnp.asarray(codes.levels)
    levels = levels & 127 if bits == 4 else jnp.pad(levels, (0, 16 - 2 * middle))
    return lax.bitcast_convert_type(levels.reshape(4, 4), jnp.uint32)


def _limbs(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 (n, 2 rows, d), the high limbs first, and the unit (n, rows) of the low ones."""
    unit = jnp.abs(y).max(-1) / LARGEST
    whole = jnp.round(y / jnp.where(unit > 0, unit, 1)[..., None]).astype(jnp.int32)
    return jnp.concatenate([whole >> 7, whole & 127], axis=1).astype(jnp.int8), unit


def _call(plan, limbs, columns, start, stop, key_table, value_table, keys, values):
    """The kernel. Its sums (n, splits, d, rows), largest scores and totals (n, splits, rows) are in base 2."""
    rows, interpret = plan.rows, plan.interpret
    leaves, tree = jax.tree.flatten((keys, values))

    def kernel(y_ref, columns_ref, start_ref, stop_ref, key_table, value_table, *refs):
        *blocks, sums_ref, largest_ref, total_ref, y_smem, weights_smem, barrier = refs
        n, split = lax.axis_index("n"), lax.axis_index("split")
        plgpu.copy_gmem_to_smem(y_ref.at[n], y_smem, barrier)
        plgpu.barrier_wait(barrier)
        column = [registers.load(columns_ref.at[n, k], COLUMN, interpret=interpret) for k in range(columns.shape[1])]
        key_levels, value_levels = ([table[k] for k in range(4)] for table in (key_table, value_table))
        begin, end = start_ref[n], stop_ref[n]
        first, count = _share(begin, end, split, plan.splits)

        def step(indices, *arguments):
            *refs, carry = arguments
            key_refs, value_refs = tree.unflatten([ref.at[0] for ref in refs])
            scores = _scores(plan, key_refs, key_levels, y_smem, column)
            token = (first + indices[0]) * BLOCK
            scores = [
                _seen(x, begin - token - SLICE * k, end - token - SLICE * k, interpret) for k, x in enumerate(scores)
            ]
            return _add(plan, value_refs, value_levels, weights_smem, scores, carry)

        def specs(arrays, by_token):
            def spec(x, token, *, coded):
                shape = [1, *x.shape[1:]]
                shape[token] = BLOCK * x.shape[token] // keys.scales.shape[2]
                return plgpu.BlockSpec(
                    tuple(shape),
                    lambda i: (n, *((first + i) * (axis == token) for axis in (1, 2))),
                    transforms=registers.tiling(shape[2]) if coded else (),
                )

            sections = [spec(x, by_token, coded=True) for x in arrays.sections]
            return sections + [spec(x, 2, coded=False) for x in arrays[1:] if x is not None]

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
            in_specs=specs(keys, 1) + specs(values, 2),
            max_concurrent_steps=STAGES,
            init_carry=carry,
        )
        largest, total, biases, sums = pipeline(*blocks)
        for k, part in enumerate(sums):
            if biases:
                bias = jnp.sum(biases[k * len(biases) * SLICE // plan.dim], axis=0)
                part = part + lax.broadcast_in_dim(bias, part.shape, (1,))
            sums_ref[n, split, pl.ds(SLICE * k, SLICE)] = part
        largest_ref[n, split] = largest
        total_ref[n, split] = jnp.sum(total, axis=0)

    shapes = [(plan.dim, rows), (rows,), (rows,)]
    weights = plan.values.groups, 2 * rows, BLOCK
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((limbs.shape[0], plan.splits, *shape), jnp.float32) for shape in shapes],
        grid=(limbs.shape[0], plan.splits),
        grid_names=("n", "split"),
        scratch_types=[
            plgpu.SMEM(limbs.shape[1:], jnp.int8, transforms=registers.SLICES),
            [plgpu.SMEM(weights[1:], jnp.int8, transforms=registers.SLICES)] * weights[0],
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        kernel_name="decode_attention",
        interpret=interpret,
    )(limbs, columns, start, stop, key_table, value_table, *leaves)


def _share(begin, end, split, splits):
    """The first block of tokens, and their number, of one of `splits` shares."""
    first = begin // BLOCK
    blocks = jnp.where(end > begin, (end + BLOCK - 1) // BLOCK - first, 0)
    each = (blocks + splits - 1) // splits
    return first + split * each, jnp.clip(blocks - split * each, 0, each)


def _scores(plan, refs, table, y_smem, column):
    """The scores (64, rows) of two tiles of tokens, in base 2."""
    side, (unit, shift, *groups) = plan.keys, column
    wide = lambda x: lax.broadcast_in_dim(x, (SLICE, plan.rows), (1,))  # noqa: E731
    terms, each = [], plan.dim // SLICE // side.groups
    for tile in _key_tiles(plan, refs.sections, table):
        right = [(x, y_smem.at[:, pl.ds(SLICE * k, SLICE)]) for k, x in enumerate(tile)]
        terms += [right[each * g : each * (g + 1)] for g in range(side.groups)]
    products = [_merged(x) for x in registers.products(terms, interpret=plan.interpret)]
    result = []
    for k in range(BLOCK // SLICE):
        scores = wide(shift)
        for g in range(side.groups):
            scale, bias = _grid(side, refs, g, k, plan.interpret)
            scores += products[k * side.groups + g] * wide(unit) * _tall(scale, plan.rows)
            if side.biased:
                scores += wide(groups[g]) * _tall(bias, plan.rows)
        result.append(scores if plan.softcap is None else plan.softcap * jnp.tanh(scores * (1 / plan.softcap)))
    return result


def _add(plan, refs, table, weights_smem, scores, carry):
    """The carry with a block of tokens added."""
    side, (largest, total, biases, sums) = plan.values, carry
    wide = lambda x: lax.broadcast_in_dim(x, (SLICE, plan.rows), (1,))  # noqa: E731
    before, largest = largest, jnp.maximum(largest, jnp.max(jnp.maximum(*scores), axis=0))
    kept = wide(jnp.exp2(before - largest))
    weights = [jnp.exp2(x - wide(largest)) for x in scores]
    total = total * kept + (weights[0] + weights[1])

    grids = [[_grid(side, refs, g, k, plan.interpret) for k in range(len(scores))] for g in range(side.groups)]
    if side.biased:
        shares = [sum(w * _tall(bias, plan.rows) for w, (_, bias) in zip(weights, grid, strict=True)) for grid in grids]
        biases = tuple(b * kept + share for b, share in zip(biases, shares, strict=True))
    # The limbs' unit is that of the block, not of all tokens: a larger weight elsewhere costs no bits here.
    sizes = [w * _tall(_largest([jnp.abs(grid[k][0]) for grid in grids]), plan.rows) for k, w in enumerate(weights)]
    bound = jnp.maximum(jnp.max(jnp.maximum(*sizes), axis=0), 1e-30)
    inverse = wide(LARGEST / bound)
    for grid, smem in zip(grids, weights_smem, strict=True):
        for k, (weight, (scale, _)) in enumerate(zip(weights, grid, strict=True)):
            whole = lax.bitcast_convert_type(weight * _tall(scale, plan.rows) * inverse + MAGIC, jnp.int32)
            for row, limb in ((0, whole >> 7), (plan.rows, whole & 127)):
                registers.store_transposed(smem, limb, row, SLICE * k, interpret=plan.interpret)
    tiles = _value_tiles(plan, refs.sections, table)  # all is read before the fence: a copy may refill what is read
    plgpu.commit_smem()
    terms = []
    for m, tile in enumerate(tiles):
        smem = weights_smem[m * side.groups // len(tiles)]
        terms.append([(x, smem.at[:, pl.ds(SLICE * k, SLICE)]) for k, x in enumerate(tile)])
    products = registers.products(terms, interpret=plan.interpret)
    unit = wide(bound * (side.unit / LARGEST))
    sums = tuple(x * kept + _merged(product) * unit for x, product in zip(sums, products, strict=True))
    return largest, total, biases, sums


def _key_tiles(plan, refs, table):
    """Levels of the block's tokens, in their order: two tiles of slices of d."""
    thread = registers.threads(interpret=plan.interpret)
    warp, index = thread >> 5, (thread & 31) >> 2
    halves = (_nibbles(plan.keys, refs, warp, 4 * k, index, 0, table, plan.interpret) for k in range(2))
    return [registers.fragments(*half, interpret=plan.interpret) for half in halves]


def _value_tiles(plan, refs, table):
    """Levels of d / 64 tiles of dimensions, each of two slices of tokens.

    The lower nibbles are the dimensions below d / 2, the upper those from d / 2 on. Of 64 dimensions the rows 16 k to
    16 k + 15 of the tile are the dimensions 8 k to 8 k + 7 and those 32 above them.
    """
    thread = registers.threads(interpret=plan.interpret)
    warp, index = thread >> 5, (thread & 31) >> 2
    nibbles = lambda row, first: _nibbles(plan.values, refs, 0, 0, row, first, table, plan.interpret)  # noqa: E731
    if plan.dim == SLICE:
        return [registers.fragments(*nibbles(8 * warp + index, 0), interpret=plan.interpret)]
    halves = [[nibbles(16 * warp + 8 * k + index, first) for k in range(2)] for first in range(0, plan.dim // 2, SLICE)]
    return [
        registers.fragments(upper[nibble], lower[nibble], interpret=plan.interpret)
        for nibble in range(2)
        for upper, lower in halves
    ]


def _nibbles(side, refs, unit, first_unit, index, first, table, interpret):
    """Levels, in words of bytes, of the rows i = first + index[thread] and i + period / 2 of a unit.

    `first` is a multiple of 64, `index` is below; the unit of each thread is first_unit + unit.
    """
    found, below = jnp.uint32(0), 0
    for ref, width in zip(refs, WIDTHS[side.bits], strict=True):
        rows = side.period * width // 8
        row = unit * rows + (index & (rows - 1))
        shift = width * (first // rows + (index >> rows.bit_length() - 1))
        words = registers.load_words(ref, row, first_unit * rows + first % rows, shift, interpret=interpret)
        found |= (words & _each(2**width - 1)) << below
        below += width
    return _levels(side, found, table, interpret)


def _each(nibble: int) -> np.uint32:
    """A word of eight of it."""
    return np.uint32(nibble * 0x11111111)


def _levels(side, indices, table, interpret):
    """Levels of the lower and of the upper nibbles of words, as bytes.

    A lookup by `byte_permute` takes 8 levels. Of 4 bits there are two: an index of the other half finds 0, because the
    levels there have no sign bit that would be repeated; the signs follow from the indices.
    """
    if not side.tabled:
        return tuple(x & np.uint32(0xF0F0F0F0) ^ SIGNS for x in (indices << 4, indices))
    permute = lambda a, b, selector: byte_permute(a, b, selector, interpret=interpret)  # noqa: E731
    flipped = indices ^ _each(8)
    pairs = []
    for below in (0, 16):  # bytes 0 and 1, then 2 and 3: levels of a lower and an upper nibble by turns
        pair = permute(table[0], table[1], indices >> below)
        pairs.append(pair | permute(table[2], table[3], flipped >> below) if side.bits == 4 else pair)
    lower, upper = permute(*pairs, 0x6420), permute(*pairs, 0x7531)
    if side.bits == 4:
        lower, upper = lower | (flipped << 4 & SIGNS), upper | (flipped & SIGNS)
    return lower, upper


def _grid(side, refs, group, tile, interpret):
    """Scale and bias of the tokens of a tile, (64,); the bias is that of the level 0."""

    def part(ref):
        place = ref.at[group, pl.ds(SLICE * tile, SLICE)]
        return registers.load(place, ROW, interpret=interpret).astype(jnp.float32)

    scale = part(refs.scales)
    return scale, part(refs.biases) + 2 ** (side.bits - 1) * scale if side.biased else None


def _seen(scores, begin, end, interpret):
    """The scores of the rows from `begin` on and below `end`, NEVER elsewhere."""
    row = registers.iota(scores.shape, 0, TILE, interpret=interpret)
    return jnp.where((row >= begin) & (row < end), scores, NEVER)


def _merged(product):
    """What products with two limbs stand for."""
    rows = product.shape[1] // 2
    return (product[:, :rows] * 128 + product[:, rows:]).astype(jnp.float32)


def _largest(numbers):
    return numbers[0] if len(numbers) == 1 else jnp.maximum(numbers[0], _largest(numbers[1:]))


def _tall(x, rows):
    return lax.broadcast_in_dim(x, (SLICE, rows), (0,))
