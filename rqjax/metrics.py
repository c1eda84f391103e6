"""Metrics of decoded vectors and estimated inner products, as the experiments report them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from rqjax.arrays.planes import as_float32

Vectors = Float[Array | np.ndarray, "*n d"]
Scalars = Float[Array | np.ndarray, "n"]
Ids = Integer[Array | np.ndarray, "m _"]


def relative_mse(x: Vectors, decoded: Vectors) -> Float[Array, ""]:
    """Mean over the vectors of squared error over squared norm: the mean squared error of unit vectors."""
    x, decoded = as_float32(x), as_float32(decoded)
    return jnp.mean(jnp.sum((x - decoded) ** 2, axis=-1) / jnp.sum(x**2, axis=-1))


def cosine(x: Vectors, decoded: Vectors) -> Float[Array, ""]:
    """Mean cosine between vectors and decoded vectors."""
    x, decoded = as_float32(x), as_float32(decoded)
    sizes = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(decoded, axis=-1)
    return jnp.mean(jnp.sum(x * decoded, axis=-1) / sizes)


def bias(true: Scalars, estimate: Scalars) -> Float[Array, ""]:
    return jnp.mean(estimate - true)


def rmse(true: Scalars, estimate: Scalars) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean((estimate - true) ** 2))


def correlation(true: Scalars, estimate: Scalars) -> Float[Array, ""]:
    return jnp.corrcoef(true, estimate)[0, 1]


def recall(found: Ids, true: Ids) -> float:
    """The share of the true nearest neighbors (m, k) that are among those found (m, l): recall k@l."""
    if len(found) != len(true):
        raise ValueError(f"expected ids of as many queries, got {len(found)} and {len(true)}")
    return float(np.mean((np.asarray(found)[:, :, None] == np.asarray(true)[:, None]).any(axis=1)))
