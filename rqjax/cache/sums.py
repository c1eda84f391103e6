"""A running softmax: sums over some tokens, and their merging (Milakov & Gimelshein, 2018)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

NEVER = -1e30
"""The score of a token that a query does not see."""


class Sums(NamedTuple):
    """Softmax sums over some tokens: the largest score, the sum of exp(score - largest), and that of the values so
    weighted."""

    largest: Float[jax.Array, "b h r"]
    total: Float[jax.Array, "b h r"]
    values: PyTree


def merged(a: Sums, b: Sums) -> Sums:
    largest = jnp.maximum(a.largest, b.largest)
    of_a, of_b = jnp.exp(a.largest - largest), jnp.exp(b.largest - largest)
    values = jax.tree.map(lambda x, y: x * of_a[..., None] + y * of_b[..., None], a.values, b.values)
    return Sums(largest, a.total * of_a + b.total * of_b, values)


def with_sinks(sums: Sums, logits: Float[Array, "h r"]) -> Sums:
    """Adds one more token for each query, with a score of its own and a value of zeros."""
    largest = jnp.broadcast_to(logits.astype(jnp.float32), sums.total.shape)
    return merged(sums, Sums(largest, jnp.ones_like(sums.total), jax.tree.map(jnp.zeros_like, sums.values)))
