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
from pallas_kernels.gpu.turning import Turned, Turning, turned
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
    softcap: float | None = None,
    splits: int | None = None,
    interpret: Any = False,
) -> Sums:
    """The softmax sums of queries over the tokens start[b] <= t < stop[b, r] of each sequence.

    Args:
      y: queries float32 (batch, heads, rows, d), scaled as the scores shall be; d is 64, 128 or 256, rows <= 16. For
        keys by `Lookup` (batch, heads, rows, columns + 1): the last column's level is always 1.
      keys, values: codes, each of 1 to 4 bits; groups are of a multiple of 64 dimensions. With `tables`, pages
        are in the place of sequences and T is 128.
      start, stop: int32 (batch,) and (batch, 1 or rows).
      shift: float32 (batch, heads, rows, 1 or T), added to the scores; one for each token only of keys by levels.
      turning: how keys turn after they are decoded. The dimension is then 64 or 128, codes are not affine, and y are
        queries of the keys that have turned, (batch, heads, rows, d).
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
    dim = y.shape[3] - (turning is None and isinstance(keys.levels, Lookup)) if dim is None else dim
    most = warp_attention.most_rows(keys, values, dim, turned=turning is not None)
    options = {"tables": tables, "dim": dim, "softcap": softcap, "splits": splits, "interpret": interpret}
    if rows > most:
        some = [slice(k, k + most) for k in range(0, rows, most)]
        shifts = [None if shift is None else shift[:, :, part] for part in some]
        stops = [stop if stop.shape[1] == 1 else stop[:, part] for part in some]
        options |= {"turning": turning}
        groups = zip(some, stops, shifts, strict=True)
        parts = [decode_attention(y[:, :, part], keys, values, start, *bounds, **options) for part, *bounds in groups]
        return Sums(*(jnp.concatenate(part, axis=2) for part in zip(*parts, strict=True)))
    plan = planned(keys, values, rows, turned=0 if turning is None else y.shape[3], **options)
    shift = jnp.zeros((batch, heads, rows, 1)) if shift is None else shift
    y, shift = (jnp.pad(x * LOG2E, [(0, 0), (0, 0), (0, plan.rows - rows), (0, 0)]) for x in (y, shift))
    y, shift = (x.reshape(-1, plan.rows, x.shape[3]) for x in (y, shift))
    by_token, shift = (shift, jnp.zeros_like(shift)) if shift.shape[2] > 1 else (None, shift)
    last = stop.max(1)
    hidden = jnp.minimum(last[:, None] - stop, (last - start)[:, None])
    hidden = jnp.pad(hidden, [(0, 0), (0, plan.rows - rows)]) if stop.shape[1] > 1 else hidden[:, :0]
    start, last, hidden = (jnp.repeat(bound.astype(jnp.int32), heads, axis=0) for bound in (start, last, hidden))
    columned = isinstance(plan.keys, Columns)
    if turning is not None:
        of_turned, unit = turned(turning, y, columned)
        whole, groups = of_turned.matrix, y[..., :0]
    else:
        y, groups = (
            (y[..., :-1], y[..., -1:]) if columned else (y, y.reshape(*y.shape[:2], plan.keys.groups, -1).sum(-1))
        )
        of_turned, (whole, unit) = None, limbs(y)
    columns = [unit * plan.keys.unit, shift[..., 0], *jnp.moveaxis(groups, -1, 0)]
    columns += [hidden.astype(jnp.float32)] if hidden.size else []
    queries = Queries(whole, jnp.stack(columns, axis=1), start, last)
    sums, largest, total = call(plan, queries, keys, values, plan.tables(keys, values), tables, by_token, of_turned)

    weight = jnp.exp2(largest - largest.max(1, keepdims=True))
    total, sums = (total * weight).sum(1), (sums * weight[:, :, None]).sum(1)
    parts = largest.max(1) / LOG2E, total, jnp.swapaxes(sums, 1, 2)
    return Sums(*(part.reshape(batch, heads, *part.shape[1:])[:, :, :rows] for part in parts))


class Queries(NamedTuple):
    """Queries as the kernel takes them, n = batch heads."""

    limbs: jax.Array
    """int8 (n, 2 rows, d), see `packed.limbs`, of queries times log2 e."""
    columns: jax.Array
    """float32 (n, 2 or 3 + groups, rows): the unit of the limbs, what is added to scores, the sums of groups.

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
) -> Plan:
    """Returns what is static of a call with so many queries a head; arguments are those of `decode_attention`."""
    rooms, heads, _, tokens = keys.scales.shape
    batch, tokens = (rooms, tokens) if tables is None else (len(tables), tokens * tables.shape[1])
    padded = -(-rows // warp_attention.TILE) * warp_attention.TILE
    sides = (
        warp_attention.key_side(keys, turned or dim, turned or padded),
        warp_attention.value_side(values, dim, padded),
    )
    dim = sides[1].dim if isinstance(sides[1], Columns) else dim
    plan = Plan(dim, padded, 1, None if softcap is None else softcap * LOG2E, *sides, interpret, turned)
    splits = warp_attention.splits_of(plan, batch * heads, tokens) if splits is None else splits
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
      turned: of keys that turn; the limbs of the queries are then those of its matrix.
    """
    operands = Operands(_flat(keys), _flat(values), by_token, None if turned is None else turned.begins)
    return warp_attention.call(plan, *queries, pages, *levels, operands, turned)


def _flat(codes: Packed) -> Arrays:
    """Keys as (n, T w / 8, d), values as (n, d w / 8, T), scales and biases as (n, groups, T), n = batch heads."""

    def flat(x):
        return None if x is None else x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1])

    sections = tuple(lax.bitcast_convert_type(flat(section), jnp.int8) for section in codes.sections)
    return Arrays(sections, flat(codes.scales), flat(codes.biases))
