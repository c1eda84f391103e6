"""Matrices to be stored under a memory budget."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import samples, vector_files
from rqjax.core import Registry, check_int, extras

OUTLIERS = 1e-4
"""Share of the synthetic matrices' elements that are uniform on [-100, 100]."""


def _synthetic(columns: int) -> Callable[[jax.Array, int], jax.Array]:
    def sample(key: jax.Array, scale: int) -> jax.Array:
        keys, shape, edge = jax.random.split(key, 3), (1024 // scale, columns), 0.5 / 0.16
        x = 0.5 + 0.16 * jax.random.truncated_normal(keys[0], -edge, edge, shape)
        far = jax.random.uniform(keys[1], shape, minval=-100, maxval=100)
        return jnp.where(jax.random.uniform(keys[2], shape) < OUTLIERS, far, x)

    return sample


def _gaussian_weights(key: jax.Array, scale: int) -> jax.Array:
    """Gaussian numbers of the size of Llama-2's 4096 x 11008 matrices, with a deviation of 0.02."""
    return 0.02 * jax.random.normal(key, (4096 // scale, 11008 // scale // 64 * 64))


def _words(key: jax.Array, scale: int) -> jax.Array:
    return samples.words(key, 4096 // scale, 256)


def _cache(kind: str) -> Callable[[jax.Array, int], jax.Array]:
    """Keys or values of all layers and heads of a trained model, a row for each token."""

    def sample(key: jax.Array, scale: int) -> jax.Array:
        with extras.explained():
            from experiments.models.models import captured

        _, arrays = captured("llama-d128", "", 2048)
        rows = [np.asarray(x).reshape(len(x), -1) for name, x in sorted(arrays.items()) if name.endswith(kind)]
        return jnp.asarray(np.concatenate(rows, axis=1)[: 2048 // scale])

    return sample


MATRICES: Registry = Registry(
    "matrix",
    {
        "synthetic_1": _synthetic(128),
        "synthetic_2": _synthetic(512),
        "synthetic_3": _synthetic(1024),
        "gaussian_weights": _gaussian_weights,
        "words": _words,
        "keys": _cache("k"),
        "values": _cache("v"),
    },
)
"""Functions from (key, scale) to a matrix with n / scale rows."""


def matrix(name: str, seed: int, scale: int) -> jax.Array:
    """A matrix by name, or the whole one of `file:PATH[#ARRAY]`, cut to columns that 64 divides."""
    check_int("scale", scale, 1, 64)
    if name.startswith("file:"):
        path, _, array = name.removeprefix("file:").partition("#")
        whole = vector_files.read(path, array)
        return jnp.asarray(whole[: len(whole) // scale, : whole.shape[1] // 64 * 64])
    return MATRICES[name](jax.random.key(2000 + seed), scale)


def word_bits(name: str) -> int:
    """Returns the bits of an element as the paper counts them."""
    return 16 if name in ("keys", "values") else 32
