"""The protocol that every quantizer obeys, and the checks that are made of what comes in.

Laws, tested for every entry of `METHODS`: `dot(y, c) == y @ decode(c).T`; `nbytes(encode(x)) * 8` is
`bits_per_vector` times the number of vectors; `encode` is the same under `jit`, `vmap` and in a loop.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree, Shaped

Codes: TypeAlias = Any
"""What `encode` returns: a pytree of arrays, each with the leading axes of the vectors."""

Vectors: TypeAlias = Shaped[Array | np.ndarray, "*n d"]
"""Vectors along the last axis in float32, bfloat16, float16 or (under x64) float64; leading axes are free."""


Queries: TypeAlias = Shaped[Array | np.ndarray, "*m d"]
"""As `Vectors`, with leading axes of their own."""


Implementation: TypeAlias = Literal["xla", "mosaic_gpu", "mps"]
"""What computes an operation: plain JAX, a fused kernel for Hopper GPUs, or MLX's kernels on Apple GPUs."""


@runtime_checkable
class Quantizer(Protocol):
    """A pytree that turns vectors into codes and back. Big quantizers are small ones nested."""

    @property
    def dim(self) -> int:
        """The dimension d of the vectors."""
        ...

    @property
    def bits_per_vector(self) -> int:
        """Bits that the codes of one vector take in memory: indices, norms, scales and padding."""
        ...

    def encode(self, x: Vectors) -> Codes:
        """Codes of the vectors `x` (*n, d).

        Raises:
          TypeError: `x` does not hold floating-point numbers.
          ValueError: the last axis of `x` is not `dim` long.
        """
        ...

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        """The vectors that `codes` stand for, in float32 (or the wider dtype of the quantizer's own arrays)."""
        ...

    def dot(self, y: Queries, codes: Codes) -> Float[Array, "*mn"]:
        """Inner products (*m, *n) of queries `y` (*m, d) and the vectors behind `codes`: `y @ decode(codes).T`.

        The queries are transformed once; the vectors are never transformed back.
        """
        ...


def check_vectors(x: Any, dim: int) -> Array:
    """`x` as an array, if it holds floating-point vectors of dimension `dim`."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"expected vectors of a floating-point dtype (float32, bfloat16, float16), got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != dim:
        raise ValueError(f"expected vectors of dimension {dim} along the last axis, got shape {x.shape}")
    return x


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """`value` as an int, if it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"expected {name} to be a whole number from {low} to {high}, got {value!r}")
    return int(value)


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


class UnknownName(KeyError):
    """A name that a registry does not hold."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for a name that is not among `known`; it names the nearest ones."""
    near = difflib.get_close_matches(name, known, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UnknownName(f"unknown {kind} {name!r}; {hint}known: {', '.join(sorted(known))}")


class Registry(dict[str, Any]):
    """A dictionary of named things whose look-up error names the nearest valid name."""

    def __init__(self, kind: str, entries: dict[str, Any]):
        self.kind = kind
        dict.__init__(self, entries)

    def __missing__(self, name: str) -> Any:
        raise unknown_name(self.kind, name, self)


def nbytes(tree: Any) -> int:
    """Bytes that the arrays of a pytree (codes, a quantizer, both) take in memory."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
