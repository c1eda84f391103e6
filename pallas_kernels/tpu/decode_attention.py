"""Attention of a few queries of each sequence to packed keys and values: Pallas Mosaic TPU.

    scores[t]  = <y, keys[t]>,  keys[t] = scale[t] * levels[index[t]] + bias[t]
    weights[t] = exp(scores[t] - largest)
    sums       = weights @ values

All query heads of a key-value head are taken together. Keys and values become int8 levels (`unpacking`), so both
products are exact: queries and weights are two int8 limbs, 15 bits. Scales and biases are folded into scores and
weights. The running softmax is that of Milakov & Gimelshein (2018); a step of the grid is some pages of all heads of a
sequence.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.packed import LARGEST, NEVER, WIDTHS, Packed, Sums, limbs
from pallas_kernels.tpu import unpacking
from pallas_kernels.tpu.unpacking import LANES, SUBLANES

PAGE = 128
"""Tokens of a page."""
MAX_PAGES, STEP_BYTES = 8, 2**20
"""Pages of a step at most, a power of two, and bytes of their codes: a step costs time however small it is."""
UNIT, SHIFT, GROUPS = 0, 1, 2
"""Columns of each query's numbers: the unit of its limbs, the number added to scores, and sums of its groups."""
MAX_GROUPS = LANES - GROUPS
"""Groups of a vector at most."""


def decode_attention(
    y: jax.Array,
    keys: Packed,
    values: Packed,
    start: jax.Array,
    stop: jax.Array,
    shift: jax.Array | None = None,
    *,
    tables: jax.Array | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> Sums:
    """The softmax sums of queries over the tokens start[b] <= t < stop[b] of each sequence.

    Args:
      y: queries float32 (batch, heads, rows, d), scaled as the scores shall be.
      keys, values: codes of 1 to 4 bits. With `tables`, pages are in the place of sequences and T is 128.
      start, stop: int32 (batch,).
      shift: float32 (batch, heads, rows, 1 or T), added to the scores.
      tables: int32 (batch, T / 128), the pages in which tokens lie.
      softcap: scores s become softcap tanh(s / softcap).
      interpret: as in `pl.pallas_call`.

    Returns:
      float32 (batch, heads, rows), (batch, heads, rows), (batch, heads, rows, d).
    """
    batch, heads, rows, dim = y.shape
    count = keys.scales.shape[3] // PAGE if tables is None else tables.shape[1]
    sides = _Side.of(keys, keys.scales.shape[3]), _Side.of(values, dim)
    pages = pages_of_step(count, sum(heads * PAGE * dim * side.bits // 8 for side in sides))
    padded = -(-rows // SUBLANES) * SUBLANES
    shift = jnp.zeros((batch, heads, rows, 1)) if shift is None else shift
    y, shift = (jnp.pad(x, [(0, 0), (0, 0), (0, padded - rows), (0, 0)]) for x in (y, shift))
    per_token = shift.shape[3] > 1
    plan = _Plan(heads, padded, pages, tables is not None, softcap, per_token, *sides)

    whole, unit = limbs(y.reshape(-1, padded, dim))
    groups = sides[0].groups
    own = jnp.repeat(jnp.eye(groups, dtype=jnp.int8), dim // groups, axis=1)  # (groups, d)
    whole = (whole[:, None] * own[:, None]).reshape(batch, heads, -1, dim)
    unit = unit.reshape(batch, heads, padded, 1)
    columns = [unit, jnp.zeros_like(unit) if per_token else shift, y.reshape(*y.shape[:3], groups, -1).sum(-1)]
    columns = jnp.concatenate(columns, axis=3)
    columns = jnp.pad(columns, [(0, 0)] * 3 + [(0, LANES - columns.shape[3])])
    bounds = jnp.stack([start, stop]).astype(jnp.int32)
    table = jnp.zeros((1, 1), jnp.int32) if tables is None else jnp.maximum(tables, 0)
    entries = [
        jnp.zeros((SUBLANES, LANES), jnp.int32) if x.levels is None else unpacking.table(x.levels, side.bits)
        for x, side in zip((keys, values), sides, strict=True)
    ]

    def blocks(codes: Packed, axis: int) -> tuple[list[Any], list[Any]]:
        parts = [(x, axis) for x in codes.sections]
        parts += [(x, 3) for x in (codes.scales, codes.biases) if x is not None]
        found = [(_pages(x, axis, codes.scales.shape[3], plan, k), x) for x, axis in parts for k in range(plan.refs)]
        return [spec for spec, _ in found], [x for _, x in found]

    def of_sequence(x: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, *x.shape[1:]), lambda b, i, *_: (b, 0, 0, 0))

    (key_specs, key_arrays), (value_specs, value_arrays) = blocks(keys, 2), blocks(values, 3)
    rest = [shift] if per_token else []
    rest_specs = [_pages(x, 3, x.shape[3], plan._replace(paged=False), 0) for x in rest]
    out = [(batch, heads, sides[1].groups * padded, dim), (batch, heads, padded, LANES)]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out]
    once = pl.BlockSpec((SUBLANES, LANES), lambda b, i, *_: (0, 0))
    sums, marks = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pl.cdiv(count, pages)),
            in_specs=[of_sequence(whole), of_sequence(columns), once, once, *rest_specs, *key_specs, *value_specs],
            out_specs=[of_sequence(x) for x in shapes],
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(bounds, table, whole, columns, *entries, *rest, *key_arrays, *value_arrays)

    groups = sides[1].groups
    sums = sums.reshape(batch, heads, groups, padded, groups, -1)
    sums = jnp.einsum("bhgrgd->bhrgd", sums).reshape(batch, heads, padded, dim)
    if sides[1].biased:
        sums = sums + jnp.repeat(marks[..., 2 : 2 + groups], dim // groups, axis=3)
    return Sums(marks[:, :, :rows, 0], marks[:, :, :rows, 1], sums[:, :, :rows])


def pages_of_step(count: int, page_bytes: int) -> int:
    """Returns how many of `count` pages a step takes."""
    pages = max(2, min(count, MAX_PAGES, STEP_BYTES // page_bytes))  # a tile of a TPU's memory is two pages of one bit
    return min(count, 1 << pages.bit_length() - 1)


class _Side(NamedTuple):
    """Static facts about keys, or about values."""

    bits: int
    groups: int
    biased: bool
    tabled: bool
    """True if levels are looked up."""

    @classmethod
    def of(cls, codes: Packed, rows: int) -> "_Side":
        bits = sum(8 * section.shape[2] for section in codes.sections) // rows
        return cls(bits, codes.scales.shape[2], codes.biases is not None, codes.levels is not None)


class _Plan(NamedTuple):
    heads: int
    rows: int
    pages: int
    """Pages of a step."""
    paged: bool
    """True if each page of a step has a place of its own."""
    softcap: float | None
    per_token: bool
    """True if the number added to a score differs from token to token."""
    keys: _Side
    values: _Side

    @property
    def refs(self) -> int:
        """Refs of each array in a step."""
        return self.pages if self.paged else 1


def _pages(x: jax.Array, axis: int, tokens: int, plan: _Plan, k: int) -> pl.BlockSpec:
    """Returns the block of an array of `tokens` tokens that a step reads, or its k-th page.

    A step that sees no token is given the block that is there already, so that nothing is read again.
    """
    shape = [1, *x.shape[1:]]
    shape[axis] = x.shape[axis] * (PAGE if plan.paged else PAGE * plan.pages) // tokens

    def at(b, i, bounds, table):
        last = lax.div(jnp.maximum(bounds[1, b] - 1, 0), PAGE)
        first = jnp.minimum(lax.div(bounds[0, b], PAGE), last)  # a window may begin behind all codes
        if plan.paged:
            return table[b, jnp.clip(plan.pages * i + k, first, last)], 0, 0, 0
        step = jnp.clip(i, lax.div(first, plan.pages), lax.div(last, plan.pages))
        return (b, 0, step, 0) if axis == 2 else (b, 0, 0, step)

    return pl.BlockSpec(tuple(shape), at)


def _kernel(plan, bounds, table, y, columns, key_levels, value_levels, *refs):
    del table  # the blocks are found by it
    *refs, sums, marks = refs
    shift = refs.pop(0) if plan.per_token else None
    by_array = [refs[n : n + plan.refs] for n in range(0, len(refs), plan.refs)]
    of_keys = len(WIDTHS[plan.keys.bits]) + 1 + plan.keys.biased
    key_refs, value_refs = by_array[:of_keys], by_array[of_keys:]
    b, i = pl.program_id(0), pl.program_id(1)
    start, stop, first = bounds[0, b], bounds[1, b], i * (plan.pages * PAGE)

    @pl.when(i == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)
        marks[...] = jnp.where(lax.broadcasted_iota(jnp.int32, marks.shape, 3) == 0, NEVER / 2, 0.0)

    @pl.when((first < stop) & (first + plan.pages * PAGE > start))
    def _():
        token = first + lax.broadcasted_iota(jnp.int32, (1, plan.pages * PAGE), 1)
        seen = (token >= start) & (token < stop)

        @pl.loop(0, plan.heads)
        def _(h):
            column = columns[0, h]
            levels, scales, biases = _read(plan, plan.keys, key_refs, h, key_levels[...], by_token=True)
            scores = _scores(plan, y[0, h], levels, column, scales, biases)
            scores = scores + (column[:, SHIFT : SHIFT + 1] if shift is None else shift[0, h])
            if plan.softcap is not None:
                scores = plan.softcap * jnp.tanh(scores * (1 / plan.softcap))
            scores = jnp.where(seen, scores, NEVER)
            old = marks[0, h]
            largest = jnp.maximum(old[:, :1], scores.max(-1, keepdims=True))
            weights, fade = jnp.exp(scores - largest), jnp.exp(old[:, :1] - largest)

            levels, scales, biases = _read(plan, plan.values, value_refs, h, value_levels[...], by_token=False)
            scaled = [jnp.where(seen, weights * scale, 0) for scale in scales]  # beyond the arrays there may be NaN
            added = [weights.sum(-1, keepdims=True)]
            added += [jnp.where(seen, weights * bias, 0).sum(-1, keepdims=True) for bias in biases]
            lane = lax.broadcasted_iota(jnp.int32, old.shape, 1)
            new = jnp.where(lane == 0, largest, old * fade)
            for n, x in enumerate(added, 1):
                new = jnp.where(lane == n, new + x, new)
            marks[0, h] = new
            fades = jnp.concatenate([fade] * len(scaled), axis=0)
            sums[0, h] = sums[0, h] * fades + _weighted(jnp.concatenate(scaled, axis=0), levels)


def _read(plan, side, refs, h, entries, *, by_token):
    """Levels of each page, (128, d) of keys and (d, 128) of values; scales and biases of each group, (1, tokens)."""
    levels = []
    for page in range(plan.pages):
        ref, k = (page, 0) if plan.paged else (0, page)
        sections = []
        for section in refs[: len(WIDTHS[side.bits])]:
            x = section[ref]
            size = x.shape[2 if by_token else 3] // (1 if plan.paged else plan.pages)
            part = pl.ds(k * size, size)
            sections.append(x[0, h, part, :] if by_token else x[0, h, :, part])
        entries_of = entries if side.tabled else None
        levels.append(unpacking.unpacked(tuple(sections), side.bits, entries_of, by_token=by_token))

    def numbers(refs):
        whole = jnp.concatenate([ref[0, h].astype(jnp.float32) for ref in refs], axis=1)
        return [whole[g : g + 1] for g in range(side.groups)]

    rest = refs[len(WIDTHS[side.bits]) :]
    return levels, numbers(rest[0]), numbers(rest[1]) if side.biased else []


def _scores(plan, y, levels, column, scales, biases):
    """Scores (rows, tokens) of limbs (groups 2 rows, d)."""
    rows = plan.rows
    order = unpacking.order(plan.keys.bits, rows, PAGE)

    def exact(product, g):
        high, low = (product[rows * n : rows * (n + 1)] for n in (2 * g, 2 * g + 1))
        return jnp.take_along_axis(high * 128 + low, order, axis=1, mode="promise_in_bounds")

    products, result = [_product(y, page) for page in levels], 0.0
    for g, scale in enumerate(scales):
        whole = jnp.concatenate([exact(product, g) for product in products], axis=1)
        result = result + whole.astype(jnp.float32) * column[:, UNIT : UNIT + 1] * scale
    for g, bias in enumerate(biases, GROUPS):
        result = result + column[:, g : g + 1] * bias
    return result


def _weighted(weights, levels):
    """Weights (n, tokens) times values, (n, d)."""
    unit = jnp.abs(weights).max(-1, keepdims=True) / LARGEST
    whole = jnp.round(weights / jnp.where(unit > 0, unit, 1)).astype(jnp.int32)
    product = _product(
        jnp.concatenate([whole >> 7, whole & 127], axis=0).astype(jnp.int8), jnp.concatenate(levels, axis=1)
    )
    high, low = product[: len(weights)], product[len(weights) :]
    return (high.astype(jnp.float32) * 128 + low.astype(jnp.float32)) * unit


def _product(limbs, levels):
    """Product int32 (n, m) of int8 (n, k) and (m, k)."""
    return lax.dot_general(limbs, levels, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
