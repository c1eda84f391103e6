"""Filters of a search, for vectors of a mask, of some ids or of a range."""

import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from rqjax.core import as_array, is_traced, operation
from rqjax.search.ids import FREE, check_range, kept, known, wide
from rqjax.search.rows import Rows, taken


class Range(NamedTuple):
    """The ids first, first + step, ..., last."""

    first: Int[Array | np.ndarray, ""]
    last: Int[Array | np.ndarray, ""]
    step: Int[Array | np.ndarray, ""]


Filter: TypeAlias = Bool[Array | np.ndarray, "_"] | Int[Array | np.ndarray, "_"] | Range


def check_filter(where: Any) -> Filter:
    """Checks a filter; raises a TypeError or ValueError. Known ids are returned in int64 if one is beyond 32 bits.

    Args:
      where: booleans (n,), of the ids 0 to n - 1; ids, whole numbers (n,); or a `range` of ids.
    """
    if isinstance(where, range):
        where = where[::-1] if where.step < 0 else where
        first, last, step = (where[0], where[-1], where.step) if where else (0, FREE, 1)
        if where and not 0 <= first <= last < 2**63:
            raise ValueError(f"expected ids from 0 to 2^63 - 1, got {first} to {last}")
        beyond = last >= 2**31
        step = min(step, 2**63 - 1 if beyond else 2**31 - 1)
        return Range(*(np.asarray(number, np.int64 if beyond else np.int32) for number in (first, last, step)))
    where = as_array(where)
    where = where if is_traced(where) else np.asarray(where)
    if where.size and where.dtype.kind not in "biu":
        raise TypeError(f"expected where to be booleans, whole numbers or a range, got {where.dtype}")
    if where.ndim != 1:
        raise ValueError(f"expected where of shape (n,), got {where.shape}")
    if where.dtype == bool:
        return where
    if is_traced(where):
        return (jnp.where(where < 2**31, where, FREE) if where.dtype.itemsize == 8 else where).astype(np.int32)
    if not where.size:
        return where.astype(np.int32)
    check_range(where)
    return where.astype(np.int64 if where.max() >= 2**31 else np.int32)


def _of_32_bits(where: Filter) -> Filter:
    """Restricts a filter to ids of 32 bits."""
    if jax.tree.leaves(where)[0].dtype != np.int64:
        return where
    if isinstance(where, Range):
        most = 2**31 - 1
        return check_filter(range(int(where.first), min(int(where.last), most) + 1, int(where.step)))
    return where[where < 2**31].astype(np.int32)


def passes(where: Filter, ids: Int[Array | np.ndarray, "rows"]) -> Bool[Array | np.ndarray, "rows"]:
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


def masked(ids: Int32[Array | np.ndarray, "rows *halves"], where: Filter) -> Int32[Array, "rows *halves"]:
    """Puts `FREE` in the place of ids that do not pass.

    Known ids in halves are compared on the host, each process's by itself. Under jit only those of 32 bits may pass.
    """
    if not wide(ids):
        return _masked(ids, _of_32_bits(where))
    if any(map(is_traced, jax.tree.leaves((ids, where)))):
        if any(not is_traced(leaf) and leaf.dtype == np.int64 for leaf in jax.tree.leaves(where)):
            raise ValueError("expected where= of ids below 2^31 under jit")
        return kept(passes(where, ids[:, 0]) & (ids[:, 1] == 0) & (ids[:, 0] >= 0), ids)
    if isinstance(ids, np.ndarray):
        return kept(passes(where, known(ids)), ids)
    shards = {str(shard.index): shard.data for shard in ids.addressable_shards}

    def part(place: Any) -> np.ndarray:
        return np.asarray(kept(passes(where, known(shards[str(place)])), shards[str(place)]))

    return jax.make_array_from_callback(ids.shape, ids.sharding, part)


@operation
def _masked(ids: Int32[Array | np.ndarray, "rows"], where: Filter) -> Int32[Array, "rows"]:
    return jnp.where(passes(where, ids), ids, FREE)


def narrowed(rows: Rows, where: Filter, least: int, most: int | None) -> tuple[Rows, bool]:
    """Restricts rows to those that pass; also returns whether they are a copy without the others.

    A copy has a power of two of rows, at least `least`, so that searches are compiled for few numbers. There is no copy
    where more than `most` rows pass, none if `most` is None, and none where numbers are not known.
    """
    if most is None or any(map(is_traced, jax.tree.leaves((rows, where)))):
        return dataclasses.replace(rows, ids=masked(rows.ids, where)), False
    ids = known(rows.ids)
    found = (ids != FREE) & passes(where if wide(rows.ids) else _of_32_bits(where), ids)
    places = np.flatnonzero(found)
    count = 2 ** (max(len(places), least) - 1).bit_length()
    if len(places) > most:
        return dataclasses.replace(rows, ids=kept(found, rows.ids)), False
    return taken(rows, np.pad(places, (0, count - len(places)), constant_values=len(ids))), True
