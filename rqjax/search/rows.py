"""Rows of an index: arrays of what it stores of each vector."""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, PyTree, Shaped

from rqjax.arrays import norms
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, as_array, is_traced, operation, pytree
from rqjax.search.centers import Cells
from rqjax.search.ids import FREE, check_ids, following, free, halves, kept, known, wide

SMALL = ("int8", "uint8")
"""Dtypes of whole numbers that vectors and queries may have."""
ENCODED = 2**22
"""Coordinates that are encoded in one call: 16 MiB in float32; a copy of more is new memory each time."""


@pytree
class Rows:
    """Arrays (rows, ...), which may be in a file."""

    codes: Codes
    ids: Int32[Array | np.ndarray, "rows *halves"]
    """Ids of the vectors, in halves if one of them is beyond 32 bits; `FREE` where there is no vector."""
    energies: Float[Array | np.ndarray, "rows"] | None
    """Energies for the metric "l2": <x, x~> of a vector x, less the index's center, and the vector x~ that its codes
    stand for. With lists, |c|^2 + 2 <c, x~ - c> + <x - c, x~ - c> with its centroid c, since distances to c are
    known."""
    stored: Codes | None
    """Codes of the store."""

    @property
    def bias(self) -> Float[Array, "rows"]:
        """Bias of inner products: -<x, x~> / 2 where that is stored, -inf where there is no vector."""
        return jnp.where(free(self.ids), -jnp.inf, 0 if self.energies is None else -self.energies / 2)

    @functools.cached_property
    def held(self) -> int:
        """Number of rows that hold a vector."""
        with jax.ensure_compile_time_eval():  # under jit too, of an index that is a constant there
            return int(jnp.sum(~free(self.ids)))


def encode(
    quantizer: Quantizer,
    store: Quantizer | None,
    metric: str,
    center: Float[Array, "d"] | None,
    x: Any,
    ids: Any,
    first: Any,
) -> Rows:
    """Rows of checked vectors, a part at a time; ids from `first` on if they are not given."""
    x = check_matrix(x, quantizer.dim)
    ids = check_ids(following(first, len(x)) if ids is None else ids, len(x))
    size = _together(quantizer)

    def part(start: int) -> PyTree:
        low = max(0, min(start, len(x) - size))  # the last part overlaps the one before: nothing is compiled for it
        coded = _encoded(quantizer, store, metric, center, as_array(x[low : low + size]))
        return jax.tree.map(lambda a: a[start - low :], coded) if start > low else coded

    parts = list(map(part, range(0, max(1, len(x)), size)))
    (finite, held), *coded = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
    for good, what, bad in (
        (finite, "finite vectors", "with NaN or Inf"),
        (held, "vectors", "too large for the codes"),
    ):
        if not is_traced(good) and not bool(good.all()):
            where = np.flatnonzero(~np.asarray(good))
            raise ValueError(f"expected {what}, got {len(where)} {bad}, the first is vector {where[0]}")
    return Rows(coded[0], jnp.asarray(ids), *coded[1:])


def _together(quantizer: Quantizer) -> int:
    """Vectors that are encoded in one call."""
    return max(1, ENCODED // quantizer.dim)


@operation
def _encoded(
    quantizer: Quantizer,
    store: Quantizer | None,
    metric: str,
    center: Float[Array, "d"] | None,
    x: Shaped[Array, "n d"],
) -> PyTree:
    """Encodes vectors. Returns whether they, and all numbers that are stored of them, are finite; codes, energies, and
    codes of the store."""
    finite = jnp.isfinite(x).all(axis=-1)
    x = moved(metric, center, x)
    codes = quantizer.encode(x)
    energies = _energies(quantizer, x, codes) if metric == "l2" else None
    made = codes, energies, None if store is None else store.encode(x)
    floats = [leaf for leaf in jax.tree.leaves(made) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    held = [jnp.isfinite(leaf).all(axis=tuple(range(1, leaf.ndim))) for leaf in floats]
    return (finite, functools.reduce(operator.and_, held, finite)), *made


def moved(metric: str, center: Float[Array, "d"] | None, x: Shaped[Array, "n d"]) -> Float[Array, "n d"]:
    """Vectors or queries in float32 as codes are of them: directions for the metric "cosine", less a center."""
    x = as_float32(x)
    x = norms.direction(x) if metric == "cosine" else x
    return x if center is None else x - center


def _energies(quantizer: Quantizer, x: Float[Array, "n d"], codes: Codes) -> Float[Array, "n"]:
    """Energies as `Rows` has them: what codes decode to, less a centroid, shrinks alike in these and in products."""
    origin = quantizer.origins[codes[0]] if isinstance(quantizer, Cells) else jnp.zeros_like(x)
    left = quantizer.decode(codes) - origin
    return jnp.sum(origin**2 + 2 * origin * left + (x - origin) * left, axis=-1).astype(jnp.float32)


def check_matrix(x: Any, dim: int | None) -> Any:
    """Returns `x`, if it holds vectors (n, dim) of floats or bytes, of any dimension if None. An object with a dtype of
    NumPy's may be a file, of which a part is read at a time."""
    x = x if isinstance(getattr(x, "dtype", None), np.dtype) and not isinstance(x, np.ndarray) else as_array(x)
    if not (jnp.issubdtype(x.dtype, jnp.floating) or x.dtype in SMALL):
        raise TypeError(f"expected vectors of a floating-point dtype, int8 or uint8, got {x.dtype}")
    if x.ndim != 2 or dim not in (None, x.shape[1]):
        raise ValueError(f"expected vectors (n, {'d' if dim is None else dim}), got shape {x.shape}")
    return x


def without(rows: Rows, ids: Any) -> Rows:
    """Frees the rows of some ids; raises a TypeError or ValueError if one is not there."""
    ids = np.asarray(as_array(ids))
    ids = known(check_ids(ids, ids.size))
    places_of(rows, ids)
    return dataclasses.replace(rows, ids=kept(~np.isin(known(rows.ids), ids), rows.ids))


def places_of(rows: Rows, ids: Shaped[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Finds the rows of some ids; raises a ValueError if one is not there."""
    old, ids = known(rows.ids), ids.astype(np.int64)  # NumPy compares int64 and uint64 in float64
    order = np.argsort(old)
    places = order[np.searchsorted(old, ids, sorter=order).clip(max=len(old) - 1)] if len(old) else ids * 0
    unknown = (ids < 0) | (old[places] != ids if len(old) else True)
    if unknown.any():
        raise ValueError(f"{unknown.sum()} ids are not in the index, the first is {ids[unknown][0]}")
    return places


def alike(*some: Rows) -> list[Rows]:
    """Returns rows with ids in halves if those of one are."""
    if not any(wide(rows.ids) for rows in some):
        return list(some)
    return [dataclasses.replace(rows, ids=halves(rows.ids)) for rows in some]


@operation
def grow(rows: Rows, count: int) -> Rows:
    """Appends free rows at the end."""

    def padded(array: Shaped[Array, "rows ..."]) -> Shaped[Array, "more ..."]:
        return jnp.pad(array, [(0, count)] + [(0, 0)] * (array.ndim - 1))

    ids = jnp.pad(rows.ids, [(0, count)] + [(0, 0)] * (rows.ids.ndim - 1), constant_values=FREE)
    return dataclasses.replace(jax.tree.map(padded, rows), ids=ids)


@operation
def put(rows: Rows, new: Rows) -> Rows:
    """Puts new rows in the first places of free ones, as far as there are such."""
    rows, new = alike(rows, new)
    places = jnp.flatnonzero(free(rows.ids), size=len(new.ids), fill_value=len(rows.ids))
    return jax.tree.map(lambda array, part: array.at[places].set(part, mode="drop"), rows, new)


@operation
def taken(rows: Rows, places: Int[Array | np.ndarray, "n"]) -> Rows:
    """Takes the rows in some places; places beyond the last one give free rows."""
    ids = kept(places < len(rows.ids), rows.ids[places])
    return dataclasses.replace(jax.tree.map(lambda array: array[places], rows), ids=ids)
