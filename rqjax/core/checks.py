"""Checks of arguments: each error names what was expected and what came."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int, PyTree


def as_array(x: Any) -> Array | np.ndarray:
    """Converts numbers to an array of jax or NumPy. Such arrays, mapped files among them, are returned as they are.
    Lists and arrays of other libraries (a tensor of PyTorch, also one that requires gradients) are converted.

    Raises:
      TypeError: these are no numbers that jax knows, or some of them are masked.
      ValueError: lists are of different lengths.
    """
    if isinstance(x, jax.Array):
        return x
    if hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError("expected an array without a mask, got a masked one")
    if not isinstance(x, np.ndarray):
        x = x.detach() if hasattr(x, "detach") else x
        try:
            x = np.asarray(x)
        except (TypeError, RuntimeError):
            if not hasattr(x, "__dlpack__"):  # a list of traced numbers
                return jnp.asarray(x)
            return jnp.from_dlpack(x.contiguous())  # of PyTorch, in bfloat16 or on another device
        except ValueError:
            raise ValueError("expected lists of one length, got several") from None
    if x.dtype.kind in "OSUMm" or x.dtype in (np.longdouble, np.clongdouble):
        raise TypeError(f"expected an array of numbers, got one of {x.dtype}")
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder())


def check_vectors(x: Any, dim: int) -> Array:
    """Returns `x` as an array, if it holds floating-point vectors of dimension `dim`."""
    x = as_array(x)
    check_floats(x, dim)
    return jnp.asarray(x)


def check_floats(x: Array | np.ndarray, dim: int) -> None:
    """Raises for an array that does not hold floating-point vectors of dimension `dim`."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected vectors of a floating-point dtype (float32, bfloat16, float16), got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"expected vectors of dimension {dim} along the last axis, got shape {x.shape}")


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """Returns `value` as an int, if it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"expected {name} to be a whole number from {low} to {high}, got {value!r}")
    return int(value)


def check_fits(**parts: Any) -> None:
    """Raises a ValueError if parts, dimensions or arrays whose last axis has them, differ in dimension."""
    dims = {
        name: part if isinstance(part, int) else (np.shape(part) or ("no dimension",))[-1]
        for name, part in parts.items()
    }
    if len(set(dims.values())) > 1:
        raise ValueError(
            f"expected parts of one dimension, got {', '.join(f'{name} of {d}' for name, d in dims.items())}"
        )


def check_positive(name: str, value: Any) -> float:
    """Returns `value` as a float, if it is a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ValueError(f"expected {name} to be a positive number, got {value!r}")
    return float(value)


def check_ints(
    name: str, x: Any, high: Any = None, shape: tuple[int, ...] | None = None
) -> Int[Array | np.ndarray, "..."]:
    """Returns `x` in int32, if it holds whole numbers from 0 to `high` in this shape; None allows any.

    Under jit, and where other processes hold a part, numbers are not known, only their kind and shape.
    """
    found = check_whole(name, x)
    if shape not in (None, found.shape):
        raise ValueError(f"expected {name} to be whole numbers of shape {shape}, got {found.shape}")
    if high is not None and _is_known(x) and _is_known(high):
        most = np.asarray(high)  # not jax.numpy's: it would narrow `found` in comparisons
        if not ((found >= 0) & (found <= most)).all():
            got = found.tolist() if found.size <= 16 else f"{found.min()} to {found.max()}"
            raise ValueError(f"expected {name} from 0 to {most.tolist()}, got {got}")
    return (x if isinstance(x, jax.Array) else np.clip(found, -(2**31), 2**31 - 1)).astype(np.int32)


def check_text(tokens: Any) -> np.ndarray:
    """Returns the tokens of a text (time,), also if they come as `input_ids` (1, time)."""
    found = check_whole("tokens", tokens)
    if found.ndim != 1 and not (found.ndim == 2 and len(found) == 1):
        raise ValueError(f"expected tokens of one text, (time,) or (1, time), got shape {found.shape}")
    return found.reshape(-1)


def check_whole(name: str, x: Any) -> Any:
    """Converts whole numbers to an array of any integer dtype, or of objects for Python's. Floats and booleans raise a
    ValueError."""
    found = None
    if not _is_known(x):
        found = x
    elif hasattr(x, "__array__"):
        found = np.asarray(x)
    elif not hasattr(x, "keys"):
        found = _objects(x)
    if found is None or (found.dtype != object and not jnp.issubdtype(found.dtype, jnp.integer)):
        got = type(x).__name__ if found is None else found.dtype
        raise ValueError(f"expected {name} to be whole numbers, got {got}")
    return found


def _objects(x: Any) -> np.ndarray | None:
    """Converts nested sequences of whole numbers to an array; None if they hold anything else."""
    try:
        found = np.array([*x], object)
        if any(isinstance(i, bool | np.bool_) for i in found.flat):
            return None
        return np.array([operator.index(i) for i in found.flat], object).reshape(found.shape)
    except TypeError:
        return None


def _is_known(x: Any) -> bool:
    """Returns whether this process has all numbers."""
    return not is_traced(x) and (not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated)


def is_traced(x: Any) -> bool:
    """Returns whether the numbers of an array are not known, as under jit."""
    return isinstance(x, Tracer)


def check_data(name: str, x: PyTree) -> None:
    """Raises a ValueError for vectors that nothing can be learned from, where the numbers are known."""
    arrays = jax.tree.leaves(x)
    for array in arrays:
        if array.ndim == 0 or len(array) < 2:
            raise ValueError(f"expected at least 2 vectors in {name}, got shape {array.shape}")
        if not is_traced(array) and not bool(jnp.isfinite(array).all()):
            raise ValueError(f"expected finite numbers in {name}, got {int((~jnp.isfinite(array)).sum())} NaN or Inf")
    if not any(map(is_traced, arrays)) and all(bool((array == array[:1]).all()) for array in arrays):
        raise ValueError(f"expected vectors that differ in {name}, got {len(arrays[0])} equal ones")
