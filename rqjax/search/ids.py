"""Ids of vectors. Those beyond 32 bits are stored as two halves in int32, since jax has no int64 by default.

The low half comes first, so that NumPy views halves as int64. `FREE` is -1 in either form.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Shaped

from rqjax.core import as_array, is_traced

FREE = -1
"""The id of a row that holds no vector."""


def check_ids(ids: Any, count: int) -> Int32[Array | np.ndarray, "n *halves"]:
    """Returns `count` different ids, or raises a TypeError or ValueError; one may be a scalar. Traced ones are not
    known. Ids are in halves if one of them is beyond 32 bits."""
    ids = check_list(ids)
    if ids.shape != (count,) and not (is_traced(ids) and ids.shape == (count, 2)):
        raise ValueError(f"expected {count} ids, got shape {ids.shape}")
    if is_traced(ids):
        return halves(ids) if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
    check_range(ids)
    values, counts = np.unique(ids, return_counts=True)
    twice = values[counts > 1]
    if len(twice):
        raise ValueError(f"expected different ids, got {len(twice)} more than once, the first is {twice[0]}")
    return ids.astype(np.int32) if not ids.size or ids.max() < 2**31 else halves(ids.astype(np.int64))


def following(first: Any, count: int) -> Int[Array | np.ndarray, "n"]:
    """Ids from `first` on; raises a ValueError if they end before. Traced ones beyond 32 bits are `FREE`."""
    if is_traced(first):
        ids = first + np.arange(count, dtype=np.int32)
        return kept(ids >= 0, ids)  # int32 wraps around
    if first + count > 2**63:
        raise ValueError(f"expected ids= for {count} vectors: those from {first} on go beyond 2^63 - 1")
    return np.arange(count, dtype=np.int64) + min(first, 2**63 - 1)


def check_list(ids: Any) -> Shaped[Array | np.ndarray, "..."]:
    """Returns whole numbers, traced or of NumPy, of one axis at least."""
    ids = as_array(ids)
    ids = ids if is_traced(ids) else np.atleast_1d(np.asarray(ids))
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"expected ids that are whole numbers, got {ids.dtype}")
    return ids if ids.size else ids.astype(np.int32)


def check_range(ids: Shaped[np.ndarray, "..."]) -> None:
    """Raises a ValueError if a known number is no id."""
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**63:
        raise ValueError(f"expected ids from 0 to 2^63 - 1, got {ids.min()} to {ids.max()}")


def wide(ids: Int[Array | np.ndarray, "n *halves"]) -> bool:
    """Returns whether the ids of rows are in halves."""
    return ids.ndim == 2


def halves(ids: Int[Array | np.ndarray, "n *halves"]) -> Int32[Array | np.ndarray, "n 2"]:
    """Splits ids into halves, unless they are."""
    if wide(ids):
        return ids
    if isinstance(ids, np.ndarray):
        return np.ascontiguousarray(ids, np.dtype("<i8")).view(np.dtype("<i4")).reshape(-1, 2)
    high = ids >> (32 if ids.dtype.itemsize == 8 else 31)
    return jnp.stack([ids.astype(jnp.int32), high.astype(jnp.int32)], axis=-1)


def whole(ids: Int32[Array | np.ndarray, "..."], *, wide: bool) -> Int[np.ndarray, "..."]:
    """Converts known ids to NumPy's: int64 if they are in halves, along the last axis."""
    ids = np.asarray(ids)
    return np.ascontiguousarray(ids).view(np.int64)[..., 0] if wide else ids


def returned(ids: Int[Array | np.ndarray, "..."], *, wide: bool) -> Int[Array | np.ndarray, "..."]:
    """Ids that a search returns: halves are joined where they are known."""
    return whole(ids, wide=True) if wide and not is_traced(ids) else ids


def known(ids: Int32[Array | np.ndarray, "n *halves"]) -> Int[np.ndarray, "n"]:
    """Converts the ids of rows to NumPy's."""
    return whole(ids, wide=wide(ids))


def free(ids: Int32[Array | np.ndarray, "n *halves"]) -> Bool[Array | np.ndarray, "n"]:
    """Mask of rows that hold no vector."""
    return (ids[:, 1] if wide(ids) else ids) == FREE


def kept(mask: Bool[Array | np.ndarray, "*m"], ids: Int32[Array | np.ndarray, "..."]) -> Int32[Array, "..."]:
    """Puts `FREE` in the place of ids where a mask is False."""
    return jnp.where(mask if mask.ndim == ids.ndim else mask[..., None], ids, FREE)
