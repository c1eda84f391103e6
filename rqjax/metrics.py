"""What the experiments report about decoded vectors and estimated inner products."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def relative_mse(x: Float[Array, "n d"], decoded: Float[Array, "n d"]) -> Float[Array, ""]:
    """Mean over the vectors of squared error over squared norm: the mean squared error of unit vectors."""
    return jnp.mean(jnp.sum((x - decoded) ** 2, axis=-1) / jnp.sum(x**2, axis=-1))


def cosine(x: Float[Array, "n d"], decoded: Float[Array, "n d"]) -> Float[Array, ""]:
    """Mean cosine between vectors and decoded vectors."""
    sizes = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(decoded, axis=-1)
    return jnp.mean(jnp.sum(x * decoded, axis=-1) / sizes)


def bias(true: Float[Array, "n"], estimate: Float[Array, "n"]) -> Float[Array, ""]:
    return jnp.mean(estimate - true)


def rmse(true: Float[Array, "n"], estimate: Float[Array, "n"]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean((estimate - true) ** 2))


def correlation(true: Float[Array, "n"], estimate: Float[Array, "n"]) -> Float[Array, ""]:
    return jnp.corrcoef(true, estimate)[0, 1]


def slope(true: Float[Array, "n"], estimate: Float[Array, "n"]) -> Float[Array, ""]:
    """Least-squares factor of the estimate on the truth: 1 if unbiased, 1 - D for mse-optimal quantizers."""
    return jnp.sum(true * estimate) / jnp.sum(true**2)
