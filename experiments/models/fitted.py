"""Strategies of caches by name, also with quantizers that learn from data, as "klt_trellis_3"."""

import functools
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


def strategy(name: str, dim: int, samples: Callable[[], jax.Array]) -> rqjax.Strategy:
    """Returns the strategy of a name; what learns is fitted to samples (*heads, n, d) as keys, in reverse as values."""
    if not learns(name):
        return rqjax.strategy(name, jax.random.key(0), dim)
    (part,), form = parsed(name)
    recipe, bits = with_bits(part)
    fit = functools.partial(rqjax.FITTED[recipe], jax.random.key(1))
    x = samples()
    keys = fit(x, bits)
    given = {"keys": x, "key_quantizer": keys} if isinstance(keys, rqjax.AcrossHeads) else {}
    return rqjax.Strategy(keys, fit(x[::-1], bits, **given), form, name)
