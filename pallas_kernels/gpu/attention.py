"""Attention of one new token of each sequence to its codes and its tokens in full precision, in three launches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import decode_attention, warp_attention
from pallas_kernels.gpu.attention_epilogue import epilogue
from pallas_kernels.gpu.attention_prologue import Window, prologue
from pallas_kernels.gpu.columns import Columns
from pallas_kernels.gpu.levels import PAGE
from pallas_kernels.gpu.positions import Angles
from pallas_kernels.gpu.rows import STEP
from pallas_kernels.gpu.turning import Turned, Turning, turned
from pallas_kernels.packed import Packed


class Constants(NamedTuple):
    """Arrays that follow from the quantizers alone. A first axis is that of the heads if these have quantizers of their
    own, else it is 1."""

    queries: jax.Array
    """float32 (heads, d, columns), by which queries are multiplied from the right."""
    groups: jax.Array | None
    """float32 (heads, groups, d), whose products with queries are the sums of groups of columns; None for keys that
    turn."""
    values: jax.Array
    """float32 (heads, columns, d), by which sums are multiplied. Rows of zeros fill it up to a multiple of `STEP`."""
    tables: tuple[tuple[jax.Array, jax.Array], ...]
    """Levels of keys and of values as the decode attention kernel reads them, for each of `_forms`."""
    turned: Turned | None = None
    """Operands of the decode attention kernel for keys that turn."""
    angles: Angles | None = None
    """Angles by which the cache turns queries to their positions."""


def _forms(keys: Packed, values: Packed, dim: int, turned: int) -> list[tuple[Any, Any]]:
    """Forms in which the decode attention kernel takes keys and values, for any number of queries a head."""
    counts = range(1, warp_attention.most_rows(keys, values, dim, turned=turned > 0) + 1)
    plans = (decode_attention.planned(keys, values, n, tables=None, dim=dim, turned=turned) for n in counts)
    return list(dict.fromkeys((plan.keys, plan.values) for plan in plans))


def constants(
    keys: Packed,
    values: Packed,
    multiplied: jax.Array | Turning,
    restored: Callable[[jax.Array], jax.Array],
    angles: Angles | None,
) -> Constants:
    """Makes the constants of `attend`.

    Args:
      keys, values: as in `decode_attention`; only their shapes and levels count.
      multiplied: the unit vectors as queries of `decode_attention`, (1 or heads, d, columns), or how keys turn.
      restored: called with its sums of values (1, 1, rows, columns): returns sums of vectors (1, 1 or heads, rows, d).
      angles: how queries turn, if the cache turns them.
    """
    turning = multiplied if isinstance(multiplied, Turning) else None
    columns = multiplied if turning is None else turning.matrix
    dim = columns.shape[1]
    forms = _forms(keys, values, dim, 0 if turning is None else dim)
    of_keys, groups, of_turned = forms[0][0], None, None
    if turning is not None:
        of_turned, columns = turned(turning, isinstance(of_keys, Columns))
    elif isinstance(of_keys, Columns):
        columns, groups = columns[..., :-1], jnp.swapaxes(columns[..., -1:], 1, 2)
    else:
        groups = jnp.swapaxes(columns.reshape(*columns.shape[:2], of_keys.groups, -1).sum(-1), 1, 2)

    width = forms[0][1].dim + 1 if isinstance(forms[0][1], Columns) else dim
    back = restored(jnp.eye(width)[None, None])[0]
    back = jnp.pad(back, [(0, 0), (0, -width % STEP), (0, 0)])
    tables = tuple((of_keys.table(keys.levels), of_values.table(values.levels)) for of_keys, of_values in forms)
    return Constants(columns, groups, back, tables, of_turned, angles)


def attend(
    q: jax.Array,
    exact: tuple[jax.Array, jax.Array],
    lengths: jax.Array,
    held: jax.Array,
    keys: Packed,
    values: Packed,
    made: Constants,
    scale: jax.Array,
    mean: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    window: Window,
    tables: jax.Array | None = None,
    softcap: float | None = None,
    splits: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of a query of each head to all tokens of its sequence up to itself.

    Args:
      q: (batch, 1, q_heads, d) in a float dtype, at most `warp_attention.most_rows` a head of keys.
      exact: keys and values in full precision, (batch, heads, slots, d), as `window` says.
      lengths, held: int32 (batch,), as in `rqjax.KVCache`.
      keys, values, tables, softcap, splits, interpret: as in `decode_attention`.
      made: constants of the codes.
      scale: float32 (1,), of the scores.
      mean: float32 (batch, heads, d), subtracted from keys before encoding; of keys before they turn, if queries turn.
      sinks: (q_heads,) scores of one more token, whose value is zero.
      window: which tokens are in full precision.

    Returns:
      As q.
    """
    dim, turns = q.shape[3], made.turned is not None
    plan = decode_attention.planned(
        keys,
        values,
        q.shape[2] // exact[0].shape[1],
        tables=tables,
        dim=dim,
        softcap=softcap,
        splits=splits,
        interpret=interpret,
        turned=dim * turns,
    )
    queries, of_exact, shift = prologue(
        q,
        *exact,
        lengths,
        held,
        made.queries,
        made.groups,
        scale,
        mean,
        window=window,
        padded=plan.rows,
        unit=plan.keys.unit,
        softcap=plan.softcap,
        turns=turns,
        angles=made.angles,
        tokens=keys.scales.shape[3] if tables is None else PAGE * tables.shape[1],
        interpret=interpret,
    )
    form = _forms(keys, values, dim, plan.turned).index((plan.keys, plan.values))
    of_codes = decode_attention.call(plan, queries, keys, values, made.tables[form], tables, shift, made.turned)
    return epilogue(*of_codes, of_exact, made.values, sinks, shape=q.shape, dtype=q.dtype, interpret=interpret)
