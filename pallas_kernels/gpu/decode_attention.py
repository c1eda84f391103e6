"""Attention of one new token of each sequence to packed keys and values: Pallas Mosaic GPU, Hopper.

    scores[t]  = <y, keys[t]>,  keys[t] = scale[t] * levels[index[t]] + bias[t]
    weights[t] = exp(scores[t] - largest)
    sums       = weights @ values

All query heads of a key-value head are taken together. Both products run on tensor cores in exact integers. Queries and
weights are two int8 limbs, 15 bits. The running softmax is that of Milakov & Gimelshein (2018). Blocks of threads share
the tokens of a head (FlashDecoding), and their sums are put together outside.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import warp_attention
from pallas_kernels.gpu.columns import Columns, Lookup
from pallas_kernels.gpu.operands import Arrays, Operands, Plan
from pallas_kernels.gpu.turning import Turned, Turning, turned, turned_queries
from pallas_kernels.packed import Packed, Sums, limbs

LOG2E = math.log2(math.e)


def decode_attention(
    y: jax.Array,
    keys: Packed,
    values: Packed,
    start: jax.Array,
    stop: jax.Array,
    shift: jax.Array | None = None,
    *,
    turning: Turning | None = None,
    tables: jax.Array | None = None,
    dim: int | None = None,
    latent: bool = False,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: Any = False,
) -> Sums:
    """The softmax sums of queries over the tokens start[b] <= t < stop[b, r] of each sequence.

    Args:
      y: queries float32 (batch, heads, rows, d), scaled as the scores shall be; d is 64, 128 or 256. For
        keys by `Lookup` (batch, heads, rows, columns + 1): the last column's level is always 1.
      keys, values: codes, each of 1 to 4 bits; groups are of a multiple of 64 dimensions. With `tables`, pages
        are in the place of sequences and T is 128.
      start, stop: int32 (batch,) and (batch, 1 or rows).
      shift: float32 (batch, heads, rows, 1 or T), added to the scores; one for each token only of keys by levels.
      turning: how keys turn after they are decoded. The dimension is then 64 or 128, codes are not affine, and y are
        queries of the keys that have turned, (batch, heads, rows, d).
      tables: int32 (batch, T / 128), the pages in which tokens lie.
      dim: of the values, unless they are by `Lookup`; d, if not given.
      latent: True if a key is one of `keys` and, behind it, the value. The codes of both are of levels and lie as
        values. Queries y are (batch, heads, rows, d + dim).
      softcap: scores s become softcap tanh(s / softcap).
      splits: blocks of threads that share the tokens of a head; enough to fill a GPU, if not given.
      interpret: False, or what `mosaic.interpreter` returns.

    Returns:
      float32 (batch, heads, rows), (batch, heads, rows), (batch, heads, rows, dim); of values by `Lookup`
      (batch, heads, rows, columns + 1), as for y.
    """
    batch, heads, rows, _ = y.shape
    dim = y.shape[3] - (turning is None and isinstance(keys.levels, Lookup)) if dim is None else dim
    options = {"tables": tables, "dim": dim, "softcap": softcap, "splits": splits, "interpret": interpret}
    plan = planned(
        keys,
        values,
        rows,
        turned=0 if turning is None else y.shape[3],
        before=y.shape[3] - dim if latent else 0,
        **options,
    )

    def in_parts(x):
        """Queries (batch, heads, rows, ...) as those of heads of the kernel."""
        x = jnp.pad(x, [(0, 0), (0, 0), (0, plan.parts * plan.rows - rows), *[(0, 0)] * (x.ndim - 3)])
        x = jnp.swapaxes(x.reshape(batch, -1, plan.parts, plan.rows, *x.shape[3:]), 1, 2)
        return jnp.broadcast_to(x, (batch, plan.parts, heads, *x.shape[3:])).reshape(-1, *x.shape[3:])

    shift = jnp.zeros((batch, heads, rows, 1)) if shift is None else shift
    y, shift = (in_parts(x * LOG2E) for x in (y, shift))
    by_token, shift = (shift, jnp.zeros_like(shift)) if shift.shape[2] > 1 else (None, shift)
    last = stop.max(1)
    hidden = jnp.minimum(last[:, None] - stop, (last - start)[:, None])
    hidden = in_parts(hidden[:, None]).astype(jnp.float32)[:, None] if stop.shape[1] > 1 else None
    start, last = (jnp.repeat(bound.astype(jnp.int32), heads * plan.parts) for bound in (start, last))
    columned = isinstance(plan.keys, Columns)
    of_turned, groups = None, []
    if turning is not None:
        of_turned, matrix = turned(turning, columned)
        whole, unit = turned_queries(matrix, y)
        units = [unit]
    elif latent:
        parts = zip(plan.scored, jnp.split(y, [plan.keys.dim], axis=2)[::-1], strict=True)
        each, units = zip(*(limbs(side.ordered(part)) for side, part in parts), strict=True)
        whole = jnp.concatenate(each, axis=2)
    else:
        y, groups = (
            (y[..., :-1], y[..., -1:]) if columned else (y, y.reshape(*y.shape[:2], plan.keys.groups, -1).sum(-1))
        )
        (whole, unit), groups = limbs(y), list(jnp.moveaxis(groups, -1, 0))
        units = [unit]
    units = [unit * side.unit for unit, side in zip(units, plan.scored, strict=True)]
    columns = jnp.stack([*units, shift[..., 0], *groups], axis=1)
    columns = columns if hidden is None else jnp.concatenate([columns, hidden], axis=1)
    queries = Queries(whole, columns, start, last)
    sums, largest, total = call(plan, queries, keys, values, plan.tables(keys, values), tables, by_token, of_turned)

    weight = jnp.exp2(largest - largest.max(1, keepdims=True))
    total, sums = (total * weight).sum(1), (sums * weight[:, :, None]).sum(1)
    found = [x.reshape(batch, plan.parts, heads, *x.shape[1:]) for x in (largest.max(1) / LOG2E, total, sums)]
    found[2] = jnp.swapaxes(found[2], 3, 4)
    found = (jnp.swapaxes(x, 1, 2) for x in found)
    return Sums(*(x.reshape(batch, heads, -1, *x.shape[4:])[:, :, :rows] for x in found))


class Queries(NamedTuple):
    """Queries as the kernel takes them, n = batch heads."""

    vectors: jax.Array
    """int8 (n, 2 rows, d), see `packed.limbs`, of queries times log2 e; of keys that turn, see `turned_queries`."""
    columns: jax.Array
    """float32 (n, 2 or 3 + groups, rows): the unit of the vectors, what is added to scores, the sums of groups.

    If there is one row more, it has how many of the last tokens a query does not see.
    """
    start: jax.Array
    """int32 (n,)."""
    stop: jax.Array
    """int32 (n,)."""


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
    turned: int = 0,
    before: int = 0,
) -> Plan:
    """Returns what is static of a call with so many queries a head; arguments are those of `decode_attention`.

    `turned` is the dimension of keys that turn, `before` that of keys before their latent.
    """
    rooms, heads, _, tokens = keys.scales.shape
    batch, tokens = (rooms, tokens) if tables is None else (len(tables), tokens * tables.shape[1])
    most = warp_attention.most_rows(keys, values, dim, turned=turned > 0, latent=before > 0)
    parts = -(-rows // most)
    padded = -(-rows // parts // warp_attention.TILE) * warp_attention.TILE
    if before:
        sides = warp_attention.latent_side(keys, before), warp_attention.latent_side(values, dim)
    else:
        sides = (
            warp_attention.key_side(keys, turned or dim, turned or padded),
            warp_attention.value_side(values, dim, padded),
        )
    dim = sides[1].dim if isinstance(sides[1], Columns) else dim
    softcap = None if softcap is None else softcap * LOG2E
    plan = Plan(dim, padded, 1, softcap, *sides, interpret, turned, before > 0, heads, parts)
    splits = warp_attention.splits_of(plan, batch * heads * parts, tokens) if splits is None else splits
    return plan._replace(splits=splits)


def call(
    plan: Plan,
    queries: Queries,
    keys: Packed,
    values: Packed,
    levels: tuple[jax.Array, jax.Array],
    pages: jax.Array | None = None,
    by_token: jax.Array | None = None,
    turned: Turned | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel: its sums (n, splits, d, rows), largest scores and totals (n, splits, rows) are in base 2.

    Args:
      plan: as `planned` returns it.
      queries: of the plan's rows.
      keys, values: as in `decode_attention`.
      levels: the plan's tables.
      pages: int32 (batch, T / 128).
      by_token: float32 (n, rows, T), added to the scores.
      turned: of keys that turn.
    """
    operands = Operands(_flat(keys), _flat(values), by_token, None if turned is None else turned.begins)
    return warp_attention.call(plan, *queries, pages, *levels, operands, turned)


def _flat(codes: Packed) -> Arrays:
    """Keys as (n, T w / 8, d), values as (n, d w / 8, T), scales and biases as (n, groups, T), n = batch heads."""

    def flat(x):
        return None if x is None else x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    sections = tuple(lax.bitcast_convert_type(flat(section), jnp.int8) for section in codes.sections)
    return Arrays(sections, flat(codes.scales), flat(codes.biases))
