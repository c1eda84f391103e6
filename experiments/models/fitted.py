"""Strategies of caches by name, also with quantizers that learn from data, as "klt_trellis_3"."""

from collections.abc import Callable
from typing import Any

import jax

import rqjax
from rqjax.recipes.strategies import checked, parsed, with_bits

CALIBRATED = ":calibrated"


def check(name: str) -> None:
    """Raises `UnknownName` with the nearest names if a name is no strategy and no recipe that learns."""
    checked(name.removesuffix(CALIBRATED))


def learns(name: str) -> bool:
    """Returns whether the quantizer of keys or of values learns from data."""
    return any(with_bits(part)[0] in rqjax.FITTED for part in parsed(name)[0])


def strategies(decoder: Any, name: str, key: jax.Array, tokens: Callable[[], jax.Array]) -> str | list[rqjax.Strategy]:
    """Returns what `Decoder.caches` takes: strategies fitted to tokens (n, time), or the name if nothing is fitted.

    With ":calibrated" behind the name, the mean that is subtracted is that of the tokens, too.
    """
    name, calibrated, _ = name.partition(CALIBRATED)
    return decoder.calibrate(tokens(), name, key) if calibrated or learns(name) else name
