"""Sampling from a decoder, token by token."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rqjax.cache.kv import KVCache
from rqjax.nn.decoder import Decoder


def generate(
    decoder: Decoder,
    caches: tuple[KVCache, ...],
    prompt: Int[Array | np.ndarray, "time"],
    *,
    key: Array,
    temperature: float | int = 1.0,
) -> Iterator[tuple[int, tuple[KVCache, ...]]]:
    """Tokens after a prompt, until one ends the text or the caller stops asking.

    Args:
      decoder: the decoder.
      caches: its caches, for one sequence; donated.
      prompt: at least one token, after those that the caches hold.
      key: random key.
      temperature: divides the logits; 0 takes the likeliest token.

    Yields:
      A token, and the caches that it was made from.

    Raises:
      ValueError: the prompt is empty, or there is no more room in the caches.
    """
    if not len(prompt):
        raise ValueError("expected a prompt of at least one token, got none")
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    room = min(cache.max_len - int(cache.lengths[0]) for cache in caches)
    while True:
        room -= tokens.shape[1]
        if room < 0:
            raise ValueError(f"no room in the caches: {caches[0].max_len} tokens are held")
        key, once = jax.random.split(key)
        tokens, caches = _step(decoder, tokens, caches, jnp.float32(temperature), once)
        token = int(tokens[0, 0])
        yield token, caches
        if token in decoder.config.eos_token_ids:
            return


def _sample(
    decoder: Decoder, tokens: Array, caches: tuple[KVCache, ...], temperature: Array, key: Array
) -> tuple[Array, tuple[KVCache, ...]]:
    logits, caches = decoder(tokens, caches, newest=1)
    noise = jax.random.gumbel(key, logits.shape)  # the largest of logits / temperature + noise is a sample
    return jnp.argmax(logits + temperature * noise, axis=-1).astype(jnp.int32), caches


_step = jax.jit(_sample, donate_argnums=2)
