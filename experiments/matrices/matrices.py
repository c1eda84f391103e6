"""Matrices to be stored under a memory budget: synthetic ones, those of a model, and the user's files."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import vector_files
from rqjax.core import Registry, check_int, extras, unknown_name

OUTLIERS = 1e-4
"""Share of the synthetic matrices' elements that are uniform on [-100, 100]."""
ROWS = 1024
"""Rows of a matrix of a model at most, and tokens of its keys and values."""
STRIDE = 11
"""Layers from one seed's matrix to the next one's, so that few seeds have matrices of all depths."""
FFN = ("gate_proj", "up_proj", "down_proj")
WEIGHTS = ("q_proj", "k_proj", "v_proj", "o_proj", *FFN, "embed_tokens")
CACHED = ("keys", "values")


def _synthetic(columns: int) -> Callable[[jax.Array, int], jax.Array]:
    def sample(key: jax.Array, scale: int) -> jax.Array:
        keys, shape, edge = jax.random.split(key, 3), (1024 // scale, columns), 0.5 / 0.16
        x = 0.5 + 0.16 * jax.random.truncated_normal(keys[0], -edge, edge, shape)
        far = jax.random.uniform(keys[1], shape, minval=-100, maxval=100)
        return jnp.where(jax.random.uniform(keys[2], shape) < OUTLIERS, far, x)

    return sample


def _gaussian_weights(key: jax.Array, scale: int) -> jax.Array:
    """Gaussian numbers of the shape of these rows of SmolLM2-135M's `up_proj`, with a deviation of 0.02."""
    return 0.02 * jax.random.normal(key, (ROWS // scale, 576))


MATRICES: Registry = Registry(
    "matrix",
    {
        "synthetic_1": _synthetic(128),
        "synthetic_2": _synthetic(512),
        "synthetic_3": _synthetic(1024),
        "gaussian_weights": _gaussian_weights,
    },
)
"""Functions from (key, scale) to a matrix with n / scale rows."""


def check(name: str) -> None:
    """Raises for a matrix that does not exist, or that needs a missing package."""
    if name.startswith("file:"):
        return
    _, separator, part = name.partition("#")
    if not separator:
        _ = MATRICES[name]
    elif part not in WEIGHTS + CACHED:
        raise unknown_name("matrix of a model", part, WEIGHTS + CACHED)
    else:
        with extras.explained():
            from experiments.models import models as models


def matrix(name: str, seed: int, scale: int) -> jax.Array:
    """A matrix by name with n / scale rows.

    Args:
      name: one of `MATRICES`; "MODEL#PART" for some rows of a weight of a model (`WEIGHTS`), or for its keys or values
        in held-out text (`CACHED`), all heads side by side; or `file:PATH[#ARRAY]`, cut to columns that 64 divides.
      seed: draws the numbers, or chooses a layer of the model.
    """
    check_int("scale", scale, 1, 64)
    model, separator, part = name.removeprefix("file:").partition("#")
    if name.startswith("file:"):
        whole = vector_files.read(model, part)
        return jnp.asarray(whole[: len(whole) // scale, : whole.shape[1] // 64 * 64])
    if not separator:
        return MATRICES[name](jax.random.key(2000 + seed), scale)
    whole = _cached(model, part, seed) if part in CACHED else _weight(model, part, seed)
    rows = np.linspace(0, len(whole) - 1, min(len(whole), ROWS) // scale).astype(int)
    return jnp.asarray(whole[rows])


def _weight(model: str, part: str, seed: int) -> np.ndarray:
    from safetensors import safe_open

    from experiments.models.models import folder

    path = folder(model) / "model.safetensors"
    with safe_open(path, framework="flax") as file:
        names = [name for name in file.keys() if name.endswith(f".{part}.weight")]  # noqa: SIM118
    return vector_files.read(str(path), _layer(names, seed))


def _cached(model: str, part: str, seed: int) -> np.ndarray:
    from experiments.models.models import captured

    _, arrays = captured(model, "", ROWS)
    x = np.asarray(arrays[_layer([name for name in arrays if name.endswith(f".{part[0]}")], seed)])
    return x.reshape(len(x), -1)


def _layer(names: list[str], seed: int) -> str:
    """Chooses one of arrays whose names have the number of their layer."""
    ordered = sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return ordered[STRIDE * seed % len(ordered)]


def word_bits(name: str) -> int:
    """Returns the bits of an element as the paper counts them."""
    return 16 if name.endswith(CACHED) else 32


def kind(name: str) -> str:
    """Returns the name of the paper's matrices that this one is like; "" if there are none."""
    part = name.rpartition("#")[2]
    return "weights" if part in FFN else part if part in CACHED or part.startswith("synthetic") else ""
