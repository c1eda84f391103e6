"""Scores of queries by the codes of a cache's keys, and what the mean and the turning of keys add to them."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.cache.kv import KVCache
from rqjax.scoring import rules

Scorer: TypeAlias = Callable[[Any, Int[Array, ""]], Float[Array, "b h r t"]]
"""Scores by a block of codes, given the position of its first key."""


def scorer(cache: KVCache, y: Float[Array, "b h r d"]) -> Scorer:
    """What scores blocks of codes for queries that have turned."""
    quantizer, mean, rope = cache.key_quantizer, cache.key_mean, cache.rope
    batch, heads, _, dim = y.shape
    unit_vectors = jnp.broadcast_to(jnp.eye(dim), (batch, heads, dim, dim))
    prepared = rules.prepare(quantizer, unit_vectors if cache.pre_rope else y)
    constant = 0 if mean is None or rope is not None else jnp.einsum("bhrd,bhd->bhr", y, mean)[..., None]

    def score(codes: Any, first: Array) -> Float[Array, "b h r t"]:
        found = rules.scores(quantizer, prepared, codes, cache.latent)
        if rope is None:
            return found + constant
        if cache.pre_rope:  # the products of unit vectors with codes are the keys, tokens last
            keys = rope.turned_rows(found, first)
            found = jnp.einsum("bhrd,bhdt->bhrt", y, keys, precision=lax.Precision.HIGHEST)
        return found if mean is None else found + rope.inner(y, mean, first, found.shape[-1])

    return score
