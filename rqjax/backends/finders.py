"""Tables of the kernels of a device: for an operation on a nest, what keeps it from a kernel, and the kernel's call."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from rqjax.core import Codes, Quantizer, Refusal


class Entry(NamedTuple):
    """Kernel of a device for an operation."""

    operation: Any
    classes: tuple[type, ...]
    """Of the operation's first argument."""
    limits: Callable[..., str | None]
    """Called with the operation's arguments: why there is no kernel for them, or None."""
    call: Callable[..., Any]
    """Computes the operation of its arguments."""
    rows: bool = True
    """As in `Kernel`."""


def register(implementation: str, missing: Callable[[], str | None], table: Iterable[Entry]) -> None:
    """Registers the kernels of a device.

    Args:
      implementation: its name.
      missing: why none of its kernels can run here, or None.
      table: its kernels.
    """
    for entry in table:
        find = functools.partial(_found, missing, entry)
        entry.operation.kernel(implementation, *entry.classes, rows=entry.rows)(find)


def _found(missing: Callable[[], str | None], entry: Entry, *args: Any, **options: Any) -> Callable[..., Any] | Refusal:
    reason = missing() or entry.limits(*args, **options)
    return Refusal(reason) if reason else entry.call


def old_jax(implementation: str) -> str | None:
    """Why this jax has no Pallas for kernels, or None."""
    if jax.__version_info__ < (0, 10, 2):
        return f"{implementation} kernels need jax 0.10.2 or newer, this is {jax.__version__}"
    return None


def of_codes(limits: Callable[[Any, Any], str | None]) -> Callable[..., str | None]:
    """Limits of `decode` from limits of a quantizer, whose codes begin with norms, and of vectors."""

    def of_decoded(quantizer: Quantizer, codes: Codes, *, dtype: DTypeLike | None = None) -> str | None:
        shape = (*codes[0].shape, quantizer.dim)
        return limits(quantizer, jax.ShapeDtypeStruct(shape, dtype or jnp.float32))

    return of_decoded
