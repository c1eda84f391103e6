"""Filters of a search, for vectors of a mask, of some ids or of a range."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from rqjax.core import as_array, is_traced, operation
from rqjax.search.rows import FREE, Rows, taken


class Range(NamedTuple):
    """The ids first, first + step, ..., last."""

    first: Int32[Array | np.ndarray, ""]
    last: Int32[Array | np.ndarray, ""]
    step: Int32[Array | np.ndarray, ""]


Filter: TypeAlias = Bool[Array | np.ndarray, "n"] | Int32[Array | np.ndarray, "n"] | Range


def check_filter(where: Any) -> Filter:
    """Checks a filter; raises a TypeError or ValueError.

    Args:
      where: booleans (n,), of the ids 0 to n - 1; ids, whole numbers (n,); or a `range` of ids.
    """
    if isinstance(where, range):
        where = where[::-1] if where.step < 0 else where
        if where and not 0 <= where[0] <= where[-1] < 2**31:
            raise ValueError(f"expected ids from 0 to 2^31 - 1, got {where[0]} to {where[-1]}")
        first, last, step = (where[0], where[-1], min(where.step, 2**31 - 1)) if where else (0, FREE, 1)
        return Range(*(np.asarray(number, np.int32) for number in (first, last, step)))
    where = as_array(where)
    where = where if is_traced(where) else np.asarray(where)
    if where.size and where.dtype.kind not in "biu":
        raise TypeError(f"expected where to be booleans, whole numbers or a range, got {where.dtype}")
    if where.ndim != 1:
        raise ValueError(f"expected where of shape (n,), got {where.shape}")
    if where.dtype == bool:
        return where
    if where.size and not is_traced(where) and not 0 <= where.min() <= where.max() < 2**31:
        raise ValueError(f"expected ids from 0 to 2^31 - 1, got {where.min()} to {where.max()}")
    return where.astype(np.int32)


def passes(where: Filter, ids: Int32[Array | np.ndarray, "rows"]) -> Bool[Array | np.ndarray, "rows"]:
    """Mask of the ids that pass; `FREE` may."""
    np_ = jnp if any(map(is_traced, jax.tree.leaves((where, ids)))) else np
    if isinstance(where, Range):
        return (ids >= where.first) & (ids <= where.last) & ((ids - where.first) % where.step == 0)
    if len(where) == 0:
        return np_.zeros(ids.shape, bool)
    if where.dtype == bool:
        return np_.asarray(where)[np_.clip(ids, 0, len(where) - 1)] & (ids < len(where))
    where = np_.sort(where)
    return where[np_.minimum(np_.searchsorted(where, ids), len(where) - 1)] == ids


@operation
def masked(ids: Int32[Array | np.ndarray, "rows"], where: Filter) -> Int32[Array, "rows"]:
    """Puts `FREE` in the place of ids that do not pass."""
    return jnp.where(passes(where, ids), ids, FREE)


def narrowed(rows: Rows, where: Filter, least: int, most: int | None) -> tuple[Rows, bool]:
    """Restricts rows to those that pass; also returns whether they are a copy without the others.

    A copy has a power of two of rows, at least `least`, so that searches are compiled for few numbers. There is no copy
    of more than `most` rows, none if `most` is None, and none where numbers are not known.
    """
    if most is None or any(map(is_traced, jax.tree.leaves((rows, where)))):
        return dataclasses.replace(rows, ids=masked(rows.ids, where)), False
    ids = np.asarray(rows.ids)
    found = (ids != FREE) & passes(where, ids)
    places = np.flatnonzero(found)
    count = 2 ** (max(len(places), least) - 1).bit_length()
    if count > most:
        return dataclasses.replace(rows, ids=jnp.asarray(np.where(found, ids, FREE))), False
    return taken(rows, np.pad(places, (0, count - len(places)), constant_values=len(ids))), True
