"""One block of tokens in the decode attention kernel of warps: its scores, and the softmax sums with it added."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.columns import Columns
from pallas_kernels.gpu.levels import TOKENS, Levels, Place
from pallas_kernels.gpu.operands import Arrays, Plan
from pallas_kernels.gpu.registers import byte_permute
from pallas_kernels.gpu.rings import Ring
from pallas_kernels.packed import NEVER

Side = Levels | Ring | Columns
TILE = 4
"""Queries that are multiplied at once: with two limbs each they are the 8 columns of a product."""
LARGEST = 127 * 256
"""Largest number that weights times scales become: two limbs, a high byte and a signed low one."""
ROUNDER = 1.5 * 2**23 + 128
"""Float32 that rounds a smaller number added to it: the sum's low bits are those of the whole number + 128."""
TINY = 1e-30
"""Scale below which the logarithm of a scale does not go."""
LIMBS = np.uint32(0x80808080)


class Queries(NamedTuple):
    """Queries of a key-value head: numbers of those that a thread has, by tiles."""

    ref: Any
    """Right sides of products in shared memory, as `Levels.right` returns them: 16 bytes for each lane."""
    units: list[list[jax.Array]]
    """Units of the limbs, by codes of `Plan.scored` and tiles."""
    shift: list[jax.Array]
    groups: list[list[jax.Array]]
    """Sums of the dimensions of each group, by groups and tiles."""
    hidden: list[jax.Array]
    """Last tokens of the range that a query does not see; none if all queries see the same tokens."""


class Weights(NamedTuple):
    """Weights of a block of tokens, and what is kept of the sums before it."""

    largest: tuple[jax.Array, ...]
    total: tuple[jax.Array, ...]
    biases: tuple[tuple[jax.Array, ...], ...]
    kept: list[jax.Array]
    """Factors of the sums before, by tiles."""
    rights: list[list[list[list[jax.Array]]]]
    """Right sides of products with values, by tiles and groups."""


class Carry(NamedTuple):
    """Softmax sums of the threads of a warp, by tiles; `total` and `biases` are of the thread's own tokens."""

    largest: tuple[jax.Array, ...]
    """The largest of score + log2 |scale of value|.

    No weight times scale is above 1, so limbs need no second maximum. A large weight of a small value costs no bits.
    """
    total: tuple[jax.Array, ...]
    biases: tuple[tuple[jax.Array, ...], ...]
    sums: tuple[tuple[jax.Array, ...], ...]
    """Numbers of dimensions, see `Levels.dimension`."""


def scores_of(
    plan: Plan, codes: list[tuple[Arrays, Any]], queries: Queries, shift: Any, place: Place
) -> list[list[jax.Array]]:
    """Scores of the thread's tokens by tiles of queries, in base 2.

    Args:
      plan: static facts.
      codes: arrays and levels for each of `Plan.scored`.
      queries: of the head.
      shift: numbers to be added to the scores, or None.
      place: of each thread.
    """
    tiles, first = range(plan.rows // TILE), 0
    scores = begun(plan, queries, shift, place)
    for side, units, (arrays, table) in zip(plan.scored, queries.units, codes, strict=True):
        for group in range(side.groups):
            scale, bias = grid(side, arrays, group, place)
            for t in tiles if side.biased else ():
                scores[t] = [x + queries.groups[group][t] * b for x, b in zip(scores[t], bias, strict=True)]
            for outer in range(side.passes):
                products = _key_products(plan, side, arrays, table, queries, group, outer, first, place)
                for t, sums in enumerate(products):
                    for inner in range(4 // side.passes):
                        for i, number in enumerate(_merged(side, sums, inner, 128)):
                            k = side.token(outer, inner, i)
                            scores[t][k] = scores[t][k] + number * (scale[k] * units[t])
        first += side.dim // 16 // side.loaded
    return capped(plan, scores)


def begun(plan: Plan, queries: Queries, shift: Any, place: Place) -> list[list[jax.Array]]:
    """Numbers to be added to scores, by tiles of queries."""
    if shift is None:
        return [[some] * len(TOKENS) for some in queries.shift]
    return [numbers(shift, TILE * t + place.q, place) for t in range(plan.rows // TILE)]


def capped(plan: Plan, scores: list[list[jax.Array]]) -> list[list[jax.Array]]:
    """Scores under a soft limit. Hardware's tanh has 11 bits, so that it would move scores of 50 by 0.02."""
    if plan.softcap is None:
        return scores
    exponent = float(2 / (plan.softcap * np.log(2)))
    return [[plan.softcap - 2 * plan.softcap / (jnp.exp2(x * exponent) + 1) for x in some] for some in scores]


def _key_products(plan, side, arrays, table, queries, group, outer, first, place):
    """Sums of the products of the tokens of a pass with queries, by tiles; `first` is the first right side."""
    tiles = range(plan.rows // TILE)
    count, of_tile = 4 // side.passes * side.terms, queries.ref.shape[0] // len(tiles)

    def added(group, sums):
        for number, factors in side.key_factors(arrays.sections, table, group, outer, place):
            products = []
            for t in tiles:
                offset = (place.lane << 4) + 512 * (of_tile * t + first + number)
                right = warps.load(queries.ref, offset, 4, interpret=plan.interpret)
                products += [(t * count + f.total, f.words, right[f.first : f.first + 2]) for f in factors]
            sums = warps.multiply_add(sums, products, interpret=plan.interpret)
        return sums

    sums = zeros(count * len(tiles), plan.interpret)
    sums = lax.fori_loop(0, side.parts, added, sums) if side.parts else added(group, sums)
    return [sums[t * count : (t + 1) * count] for t in tiles]


def zeros(count: int, interpret: Any) -> list[list[jax.Array]]:
    zero = registers.full(jnp.int32(0), (registers.THREADS,), registers.words_layout(), interpret=interpret)
    return [[zero] * 4] * count


def _merged(side: Side, sums: list[list[jax.Array]], number: int, radix: int) -> list[jax.Array]:
    """Returns the float32 numbers that the sums of two limbs stand for, of two rows."""
    some = sums[number * side.terms : (number + 1) * side.terms]
    some = some[0] if len(some) == 1 else [y - x for x, y in zip(*some, strict=True)]
    return [(some[2 * r] * radix + some[2 * r + 1]).astype(jnp.float32) for r in range(2)]


def numbers(refs: Any, row: Any, place: Place) -> list[jax.Array]:
    """Numbers of the thread's tokens in a row of refs (rows, tokens) of any float dtype, in the order of TOKENS."""
    found, dtype, tokens = [], refs[0].dtype, refs[0].shape[-1]
    for k in (0, 8):
        offset = (row * tokens + place.key + k) * dtype.itemsize
        words = warps.load(refs, offset, dtype.itemsize, half=place.half, interpret=place.interpret)
        for word in words:
            if dtype == jnp.float32:
                found.append(lax.bitcast_convert_type(word, jnp.float32))
            elif dtype == jnp.float16:
                found += warps.halves(word, interpret=place.interpret)
            else:
                pair = word << 16, word & np.uint32(0xFFFF0000)
                found += [lax.bitcast_convert_type(x, jnp.float32) for x in pair]
    return found


def grid(side: Side, arrays: Arrays, group: int, place: Place) -> tuple[list[jax.Array], list[jax.Array]]:
    """Scales of the thread's tokens, and biases if there are: those of the level 0."""
    scale = numbers(arrays.scales, group, place)
    if not side.biased:
        return scale, []
    if arrays.biases is None:
        return scale, scale
    middle = 2 ** (side.bits - 1)
    return scale, [b + middle * s for b, s in zip(numbers(arrays.biases, group, place), scale, strict=True)]


def seen(place: Place, begin: jax.Array, end: jax.Array) -> list[jax.Array]:
    """Returns which of the thread's tokens are from `begin` on and below `end` of the block."""
    first, size = place.token - begin, (end - begin).astype(jnp.uint32)
    return [(first + k).astype(jnp.uint32) < size for k in TOKENS]


def masked(mask: list[jax.Array], some: list[jax.Array], other: float) -> list[jax.Array]:
    return [jnp.where(see, x, other) for see, x in zip(mask, some, strict=True)]


def weighed(
    plan: Plan,
    arrays: Arrays,
    scores: list[list[jax.Array]],
    mask: list[jax.Array],
    masks: list[list[jax.Array]],
    carry: Carry,
    place: Place,
    reduced: Callable[[list[jax.Array]], list[jax.Array]] = lambda tops: tops,
) -> Weights:
    """The weights of a block of tokens; `masks` has what the queries of each tile see of it. Scales and biases of
    tokens that are not seen may be not-a-number. `reduced` makes maxima of a warp, by tiles, those of all that share
    sums."""
    side, interpret = plan.values, plan.interpret
    grids = [grid(side, arrays, group, place) for group in range(side.groups)]
    grids = [tuple(masked(mask, some, 0.0) if some else some for some in parts) for parts in grids]
    sizes = [functools.reduce(jnp.maximum, map(jnp.abs, some)) for some in zip(*(s for s, _ in grids), strict=True)]
    sizes = [warps.log2(x + TINY, interpret=interpret) for x in sizes]
    scales = [[x * jnp.float32(LARGEST) for x in scale] for scale, _ in grids]
    scores = [masked(*some, NEVER) for some in zip(masks, scores, strict=True)]
    tops = [tree(jnp.maximum, [x + size for x, size in zip(score, sizes, strict=True)]) for score in scores]
    tops = reduced([over_tokens(jnp.maximum, top, interpret) for top in tops])
    largest, total, biases, kept, rights = [], [], [], [], []
    for t, (score, top) in enumerate(zip(scores, tops, strict=True)):
        largest.append(jnp.maximum(carry.largest[t], top))
        kept.append(jnp.exp2(carry.largest[t] - largest[t]))
        weights = [jnp.exp2(x - largest[t]) for x in score]
        total.append(carry.total[t] * kept[t] + tree(jnp.add, weights))
        shares = [tree(jnp.add, [w * b for w, b in zip(weights, bias, strict=True)]) for _, bias in grids if bias]
        biases.append(tuple(b * kept[t] + share for b, share in zip(carry.biases[t], shares, strict=True)))
        rights.append([_right(side, weights, scale, place) for scale in scales])
    return Weights(tuple(largest), tuple(total), tuple(biases), kept, rights)


def accumulated(
    plan: Plan,
    arrays: Arrays,
    table: Any,
    scores: list[list[jax.Array]],
    mask: list[jax.Array],
    masks: list[list[jax.Array]],
    carry: Carry,
    place: Place,
) -> Carry:
    """The carry with a block of tokens added; arguments are those of `weighed`."""
    side, interpret = plan.values, plan.interpret
    weights = weighed(plan, arrays, scores, mask, masks, carry, place)
    sums = [list(some) for some in carry.sums]
    for numbers, lefts in side.value_factors(arrays.sections, table, place):
        groups = [side.dimension(number) * side.groups // side.dim for number in numbers]
        for t, right in enumerate(weights.rights):
            products = [
                (f.total, f.words, right[groups[f.total // side.terms]][k][f.first : f.first + 2])
                for k, factors in enumerate(lefts)
                for f in factors
            ]
            found = warps.multiply_add(zeros(len(numbers) * side.terms, interpret), products, interpret=interpret)
            add(side, sums[t], weights.kept[t], numbers, found)
    return Carry(weights.largest, weights.total, weights.biases, tuple(map(tuple, sums)))


def add(side: Side, sums: list[jax.Array], kept: jax.Array, numbers: list[int], found: list[list[jax.Array]]) -> None:
    """Adds products with values to the sums with these first numbers."""
    for inner, number in enumerate(numbers):
        for r, product in enumerate(_merged(side, found, inner, 256)):
            sums[number + r] = sums[number + r] * kept + product


def _right(side: Side, weights: list[jax.Array], scale: list[jax.Array], place: Place) -> list[list[jax.Array]]:
    """Right sides of the products with values: limbs of weights times scales, of 16 tokens of a column each."""
    permute = functools.partial(byte_permute, interpret=place.interpret)
    whole = [lax.bitcast_convert_type(w * x + ROUNDER, jnp.uint32) for w, x in zip(weights, scale, strict=True)]
    packed = []
    for a, b, c, d in (whole[:4], whole[4:]):
        low, high = permute(a, b, 0x5140), permute(c, d, 0x5140)
        limbs = permute(low, high, 0x7632), permute(low, high, 0x5410) ^ LIMBS
        for h in range(2):
            lane = ((place.q << 1) + h << 2) + (place.g >> 1)
            high_limb, low_limb = (warps.shuffle(x, lane, interpret=place.interpret) for x in limbs)
            packed.append(jnp.where((place.g & 1) == 1, low_limb, high_limb))
    return list(side.right(packed, interpret=place.interpret))


def over_tokens(function: Any, x: jax.Array, interpret: Any) -> jax.Array:
    """Reduces the numbers of the threads of a warp that have one query."""
    for xor in (4, 8, 16):
        x = function(x, warps.shuffle(x, xor=xor, interpret=interpret))
    return x


def tree(function: Any, some: list[jax.Array]) -> jax.Array:
    """Reduces numbers by pairs."""
    while len(some) > 1:
        odd = some[len(some) & -2 :]
        some = [function(*pair) for pair in zip(some[::2], some[1::2], strict=False)] + odd
    return some[0]
