"""Tables of a device's kernels: the operation of each, its limits on arguments, and its call."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rqjax.arrays import packing
from rqjax.backends.nests import RotatedScalar
from rqjax.core import Codes, Quantizer, Refusal


class Entry(NamedTuple):
    """Kernel of a device for an operation."""

    operation: Any
    classes: tuple[type, ...]
    """Classes of the operation's first argument."""
    limits: Callable[..., str | None]
    """Called with the operation's arguments: returns why there is no kernel for them, or None."""
    call: Callable[..., Any]
    """Computes the operation from its arguments."""
    rows: bool = True
    """True if leading axes are independent rows, as in `Kernel`."""


def register(implementation: str, missing: Callable[[], str | None], table: Iterable[Entry]) -> None:
    """Registers the kernels of a device.

    Args:
      implementation: name of the device's implementation.
      missing: returns why none of its kernels can run here, or None.
      table: its kernels.
    """
    for entry in table:
        find = functools.partial(_found, missing, entry)
        entry.operation.kernel(implementation, *entry.classes, rows=entry.rows)(find)


def _found(missing: Callable[[], str | None], entry: Entry, *args: Any, **options: Any) -> Callable[..., Any] | Refusal:
    reason = missing() or entry.limits(*args, **options)
    return Refusal(reason) if reason else entry.call


def old_jax(implementation: str) -> str | None:
    """Returns why this jax has no Pallas for kernels, or None."""
    if jax.__version_info__ < (0, 10, 2):
        return f"{implementation} kernels need jax 0.10.2 or newer, this is {jax.__version__}"
    return None


def of_vectors(limits: Callable[..., str | None]) -> Callable[..., str | None]:
    """Makes limits of `encode` and `roundtrip` from limits of a quantizer and vectors that fit it."""

    def of_fitting(quantizer: Quantizer, x: Any) -> str | None:
        if x.ndim == 0 or x.shape[-1] != quantizer.dim or not jnp.issubdtype(x.dtype, jnp.floating):
            return f"kernels take vectors of dimension {quantizer.dim} in floating point, not {x.dtype} {x.shape}"
        return limits(quantizer, x)

    return of_fitting


def of_codes(limits: Callable[[Any, Any], str | None]) -> Callable[..., str | None]:
    """Makes limits of `decode` from limits of a quantizer and vectors. Codes begin with norms."""

    def of_decoded(quantizer: Quantizer, codes: Codes, *, dtype: DTypeLike | None = None) -> str | None:
        shape = (*codes[0].shape, quantizer.dim)
        if reason := limits(quantizer, jax.ShapeDtypeStruct(shape, dtype or jnp.float32)):
            return reason
        leaf, words = RotatedScalar.of(quantizer).leaf, codes[1].shape[-1]
        wanted = packing.words_per_vector(leaf.dim, leaf.bits)
        return None if words == wanted else f"kernels take {wanted} words a vector, not {words}"

    return of_decoded
