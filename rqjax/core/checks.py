"""Checks of what comes in: each error names what was expected and what came."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree


def check_vectors(x: Any, dim: int) -> Array:
    """`x` as an array, if it holds floating-point vectors of dimension `dim`."""
    x = jnp.asarray(x)
    check_floats(x, dim)
    return x


def check_floats(x: Array | np.ndarray, dim: int) -> None:
    """Raises for an array that does not hold floating-point vectors of dimension `dim`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected vectors of a floating-point dtype (float32, bfloat16, float16), got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"expected vectors of dimension {dim} along the last axis, got shape {x.shape}")


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int, if it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"expected {name} to be a whole number from {low} to {high}, got {value!r}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """`value` as a float, if it is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ValueError(f"expected {name} to be a positive number, got {value!r}")
    return float(value)


def is_traced(x: Any) -> bool:
    """Whether the numbers of an array are not known, as under jit."""
    return isinstance(x, Tracer)


def check_data(name: str, x: PyTree) -> None:
    """Raises a ValueError for vectors that nothing can be learned from, where the numbers are known."""
    for array in jax.tree.leaves(x):
        if array.ndim == 0 or len(array) < 2:
            raise ValueError(f"expected at least 2 vectors in {name}, got shape {array.shape}")
        if is_traced(array):
            continue
        if not bool(jnp.isfinite(array).all()):
            raise ValueError(f"expected finite numbers in {name}, got {int((~jnp.isfinite(array)).sum())} NaN or Inf")
        if bool((array == array[:1]).all()):
            raise ValueError(f"expected vectors that differ in {name}, got {len(array)} equal ones")
