"""One block of tokens in the decode attention kernel: its scores, and the softmax sums with it added."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import registers, tensor_cores
from pallas_kernels.gpu.columns import Columns
from pallas_kernels.gpu.registers import SLICE, TILE
from pallas_kernels.packed import LARGEST, NEVER

BLOCK = 128
"""Tokens of a step."""
MAX_ROWS = 16
"""Queries of one key-value head."""
MAGIC = 1.5 * 2**23
"""Float32 that rounds a smaller number added to it: the sum's low bits are those of the whole number."""


def scores_of(plan, refs, table, y_smem, column, by_token=None):
    """The scores (64, rows) of two tiles of tokens, in base 2; `by_token` is what is added to each token's."""
    side, (unit, shift, *groups) = plan.keys, column
    wide = lambda x: lax.broadcast_in_dim(x, (SLICE, plan.rows), (1,))  # noqa: E731
    each, scores = y_smem.shape[1] // SLICE // side.groups, [wide(shift)] * (BLOCK // SLICE)
    if by_token is not None:
        parts = [by_token.at[pl.ds(SLICE * k, SLICE)] for k in range(len(scores))]
        scores = [registers.load(part, TILE, interpret=plan.interpret) for part in parts]
    tiles = side.key_tiles(refs.sections, table, BLOCK, interpret=plan.interpret)
    for n, tile in enumerate(tiles):
        part, k = divmod(n, len(scores))
        terms = [(x, y_smem.at[:, pl.ds(SLICE * (part * len(tile) + i), SLICE)]) for i, x in enumerate(tile)]
        by_group = [terms[each * g : each * (g + 1)] for g in range(side.groups)]
        for g, product in enumerate(tensor_cores.products(by_group, interpret=plan.interpret)):
            scale, bias = _grid(plan, side, refs, g, k)
            scores[k] += _merged(product) * wide(unit) * _tall(scale, plan.rows)
            if side.biased and part == 0:
                scores[k] += wide(groups[g]) * _tall(bias, plan.rows)
    return scores if plan.softcap is None else [plan.softcap * jnp.tanh(x * (1 / plan.softcap)) for x in scores]


def accumulated(plan, refs, table, weights_smem, scores, carry):
    """The carry with a block of tokens added."""
    side, (largest, total, biases, sums) = plan.values, carry
    wide = lambda x: lax.broadcast_in_dim(x, (SLICE, plan.rows), (1,))  # noqa: E731
    before, largest = largest, jnp.maximum(largest, jnp.max(jnp.maximum(*scores), axis=0))
    kept = wide(jnp.exp2(before - largest))
    weights = [jnp.exp2(x - wide(largest)) for x in scores]
    total = total * kept + (weights[0] + weights[1])

    grids = [[_grid(plan, side, refs, g, k) for k in range(len(scores))] for g in range(side.groups)]
    if side.biased:
        shares = [sum(_times(w, bias) for w, (_, bias) in zip(weights, grid, strict=True)) for grid in grids]
        biases = tuple(b * kept + share for b, share in zip(biases, shares, strict=True))
    # The limbs' unit is the block's own, so that a larger weight elsewhere costs no bits here.
    sizes = [_times(w, _largest([jnp.abs(grid[k][0]) for grid in grids])) for k, w in enumerate(weights)]
    bound = jnp.maximum(jnp.max(jnp.maximum(*sizes), axis=0), 1e-30)
    inverse, tokens = wide(LARGEST / bound), [tokens_of(plan, k) for k in range(len(scores))]
    for grid, smem in zip(grids, weights_smem, strict=True):
        for k, (weight, (scale, _)) in enumerate(zip(weights, grid, strict=True)):
            whole = lax.bitcast_convert_type(_times(weight, scale) * inverse + MAGIC, jnp.int32)
            for row, limb in ((0, whole >> 7), (plan.rows, whole & 127)):
                tensor_cores.store_transposed(smem, limb, row, *tokens[k], interpret=plan.interpret)
    # Everything is read before the last fence, since a copy may refill shared memory after it.
    indices = side.value_indices(refs.sections, interpret=plan.interpret)
    plgpu.commit_smem()
    unit, sums = wide(bound * (side.unit / LARGEST)), list(sums)
    paired = plan.dim * plan.rows < 256 * MAX_ROWS  # else there are too few registers for two sums at once
    for tiles in side.value_tiles(indices, table, paired=paired, interpret=plan.interpret):
        terms = []
        for m, tile in tiles.items():
            smem = weights_smem[m * side.groups // len(sums)]
            terms.append([(x, smem.at[:, pl.ds(SLICE * k, SLICE)]) for k, x in enumerate(tile)])
        for m, product in zip(tiles, tensor_cores.products(terms, interpret=plan.interpret), strict=True):
            sums[m] = sums[m] * kept + _merged(product) * unit
    if isinstance(side, Columns):
        plgpu.commit_smem()  # its codes have been read one tile after the other
    return largest, total, biases, tuple(sums)


def _grid(plan, side, refs, group, tile):
    """Scale and bias of the tokens of a tile of keys, (64,), of one side; the bias is that of the level 0."""

    def part(ref):
        return plan.keys.numbers(ref.at[group], tile, interpret=plan.interpret).astype(jnp.float32)

    scale = part(refs.scales)
    if not side.biased:
        return scale, None
    return scale, scale if refs.biases is None else part(refs.biases) + 2 ** (side.bits - 1) * scale


def seen(plan, scores, tile, begin, end):
    """The scores of a tile's tokens from `begin` on and below `end` of the block, NEVER elsewhere."""
    first, token = tokens_of(plan, tile)
    return jnp.where((token >= begin - first) & (token < end - first), scores, NEVER)


def tokens_of(plan, tile):
    """Returns the token of the block that each score belongs to, as the keys' `token` returns it."""
    return plan.keys.token(tile, registers.iota((SLICE, plan.rows), 0, TILE, interpret=plan.interpret))


def _merged(product):
    """Returns the float32 numbers that products with two limbs stand for."""
    rows = product.shape[1] // 2
    return (product[:, :rows] * 128 + product[:, rows:]).astype(jnp.float32)


def _largest(numbers):
    return numbers[0] if len(numbers) == 1 else jnp.maximum(numbers[0], _largest(numbers[1:]))


def _times(weights, x):
    """Multiplies weights by a number of each token. Weight 0 gives 0, since an unseen number may be not-a-number."""
    return jnp.where(weights > 0, weights * _tall(x, weights.shape[1]), 0.0)


def _tall(x, rows):
    return lax.broadcast_in_dim(x, (SLICE, rows), (0,))
