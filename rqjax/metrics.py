"""Metrics of decoded vectors and estimated inner products, as the experiments report them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

Vectors = Float[Array | np.ndarray, "*n d"]
Scalars = Float[Array | np.ndarray, "n"]
Ids = Integer[Array | np.ndarray, "m _"]


def relative_mse(x: Vectors, decoded: Vectors) -> Float[Array, ""]:
    """Mean over the vectors of squared error over squared norm: the mean squared error of unit vectors."""
    x, decoded = _wide(x), _wide(decoded)
    return jnp.mean(jnp.sum((x - decoded) ** 2, axis=-1) / jnp.sum(x**2, axis=-1))


def cosine(x: Vectors, decoded: Vectors) -> Float[Array, ""]:
    """Mean cosine between vectors and decoded vectors."""
    x, decoded = _wide(x), _wide(decoded)
    sizes = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(decoded, axis=-1)
    return jnp.mean(jnp.sum(x * decoded, axis=-1) / sizes)


def bias(true: Scalars, estimate: Scalars) -> Float[Array, ""]:
    return jnp.mean(estimate - true)


def rmse(true: Scalars, estimate: Scalars) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean((estimate - true) ** 2))


def correlation(true: Scalars, estimate: Scalars) -> Float[Array, ""]:
    return jnp.corrcoef(true, estimate)[0, 1]


def recall(found: Ids, true: Integer[Array | np.ndarray, "_ _"]) -> float:
    """The share of the true nearest neighbors (m, k) that are among those found (m, l): recall k@l. Ids below 0, which
    stand for none, are not counted."""
    if len(found) != len(true):
        raise ValueError(f"expected ids of as many queries, got {len(found)} and {len(true)}")
    found, true = (np.asarray(ids).astype(np.int64) for ids in (found, true))  # NumPy compares uint64 in float64
    hits = sum(np.isin(near[near >= 0], own).sum() for own, near in zip(found, true, strict=True))
    return float(np.divide(hits, (true >= 0).sum()))


def _wide(x: Vectors) -> Float[Array, "*n d"]:
    """Converts vectors to float32 at least: squares of float16 overflow."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
