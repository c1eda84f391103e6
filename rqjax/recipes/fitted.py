"""The registry of recipes that learn from data, and what they have in common."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from rqjax.core import ELSEWHERE, Key, Quantizer, Registry, as_array, platforms

FITTED = Registry("fitted method", {})
"""Recipes that learn from data: `FITTED[name](key, x, bits)`. One with a parameter `queries` may also be given what
`Decoder.calibrate` sees of attention. For keys that is the second moment of their queries, (heads, d, d). For values it
is that moment and, as `keys` and `key_quantizer`, their keys (heads, n, d) and the quantizer of these."""
ELSEWHERE["learns from data: Decoder.calibrate fits it for caches, rqjax.FITTED to vectors"] = FITTED
USAGE = """
Args:
  key: random key.
  x: samples (n, d), or (heads, n, d) for a quantizer for each head, all fitted at once, in a `PerHead`.
  bits: bits a coordinate, from 1 to 8.

Returns:
  A quantizer of vectors (..., d), or of vectors (..., heads, tokens, d).

Raises:
  ValueError: x has another shape, holds fewer than 2 vectors or NaN, or bits are out of range.

Example:
  >>> import jax, rqjax
  >>> x = jax.random.normal(jax.random.key(1), (300, 32))
  >>> rqjax.{name}(jax.random.key(0), x, bits=2).encode(x[:5]) is not None
  True
"""
"""Text that completes the docstring of every one of them."""


def fitted(recipe: Callable[..., Quantizer]) -> Callable[..., Quantizer]:
    """Enters a recipe into `FITTED`, runs it on the host where the device is Apple's, and completes its docstring."""
    make = platforms.made_on_host(recipe)

    @functools.wraps(recipe)
    def run(key: Key, x: Any, bits: float | int, **options: Any) -> Quantizer:
        return make(key, jnp.asarray(as_array(x)), bits, **options)

    FITTED[recipe.__name__] = run
    run.__doc__ = f"{inspect.getdoc(recipe)}\n{USAGE.format(name=recipe.__name__)}"
    return run
