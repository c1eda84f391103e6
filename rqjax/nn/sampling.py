"""The next token of texts: what a decoder is called with, and what is sampled of its logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.cache.kv import KVCache

SMALL = 8
"""The rest of a prompt takes the time of a chunk, or if it fits of this part of one."""


def padded(piece: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of one of three sizes with a piece of text at its end, so that few sizes are compiled, and its tokens."""
    size = next(size for size in (1, chunk // SMALL, chunk) if size >= len(piece))
    return np.pad(piece, (size - len(piece), 0))[None], np.array([len(piece)])


def _next_tokens(
    decoder: Callable[..., Any],
    tokens: Int[Array, "batch time"],
    caches: tuple[KVCache, ...],
    temperature: Float[Array, "batch"],
    top_p: Float[Array, "batch"],
    keys: Array,
    valid: Int[Array, "batch"] | None = None,
    slots: Int[Array, "batch"] | None = None,
) -> tuple[Int[Array, "batch"], tuple[KVCache, ...]]:
    logits, caches = decoder(tokens, caches, valid=valid, slots=slots, newest=1)
    return sampled(logits[:, 0], temperature, top_p, keys), caches


next_tokens = jax.jit(_next_tokens, donate_argnums=2)
"""A token after each sequence, and the caches with those before it; the caches are donated."""


def sampled(
    logits: Float[Array, "batch vocab"], temperature: Float[Array, "batch"], top_p: Float[Array, "batch"], keys: Array
) -> Int[Array, "batch"]:
    """A token by the logits of each sequence, with a key of its own."""

    def nucleus() -> Array:
        scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
        order = jnp.argsort(-scaled, axis=-1)
        chances = jnp.take_along_axis(jax.nn.softmax(scaled), order, axis=-1)
        before = jnp.cumsum(chances, axis=-1) - chances
        before = jnp.take_along_axis(before, jnp.argsort(order, axis=-1), axis=-1)
        return jnp.where(before < jnp.maximum(top_p, 1e-6)[:, None], logits, -jnp.inf)

    kept = lax.cond((top_p < 1).any(), nucleus, lambda: logits)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(kept + temperature[:, None] * noise, axis=-1).astype(jnp.int32)  # a sample of kept / temperature


@jax.jit
def keys_of(seeds: Array, counts: Array) -> Array:
    """A random key for each sequence, by its seed and how many tokens were made of it."""
    return jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seeds, counts)
