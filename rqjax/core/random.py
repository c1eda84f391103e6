"""Random numbers: the only place of the library that draws them.

Keys are folded with a constant first. Otherwise data that a user draws with the key of a quantizer, or with a part of
it, would be the very numbers that its rotation is made of.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Key: TypeAlias = Array | np.ndarray | np.integer | int
"""A key of `jax.random`, typed or as its numbers, or the seed of one."""
OWN = 0x72716A78
"""Constant that is folded into keys, "rqjx" in ASCII."""


def as_key(key: Any) -> Array:
    """One key for `jax.random`.

    Raises:
      TypeError: it is neither a key nor a seed.
      ValueError: there are several.
    """
    if type(key) is int:
        return jax.random.key(key)
    dtype: Any = getattr(key, "dtype", None)
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"expected a random key, such as jax.random.key(0), or a seed, got {key!r}")
    if not typed and key.ndim == 0:
        return jax.random.key(key)
    if key.ndim != (0 if typed else 1):
        raise ValueError(f"expected one random key, got an array of shape {key.shape}")
    return jnp.asarray(key)


def split(key: Key, count: int = 2) -> Array:
    return jax.random.split(as_key(key), count)


def fold_in(key: Key, number: int | Array) -> Array:
    return jax.random.fold_in(as_key(key), number)


def _drawn(draw: Callable[..., Array]) -> Callable[..., Array]:
    return functools.wraps(draw)(lambda key, *args, **options: draw(fold_in(key, OWN), *args, **options))


exponential, normal, permutation = map(_drawn, (jax.random.exponential, jax.random.normal, jax.random.permutation))
rademacher, randint, uniform = map(_drawn, (jax.random.rademacher, jax.random.randint, jax.random.uniform))
