"""Sampling from a decoder, token by token."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rqjax.cache.kv import KVCache
from rqjax.cache.pages import CHUNK, Grid
from rqjax.nn.decoder import Decoder
from rqjax.nn.sampling import next_tokens, padded


def generate(
    decoder: Decoder,
    caches: tuple[KVCache, ...],
    prompt: Int[Array | np.ndarray, "time"],
    *,
    key: Array,
    temperature: float | int = 1.0,
    top_p: float | int = 1.0,
    chunk: int = CHUNK,
) -> Iterator[tuple[int, tuple[KVCache, ...]]]:
    """Tokens after a prompt, until one ends the text or the caller stops asking.

    Args:
      decoder: the decoder.
      caches: its caches, for one sequence; donated.
      prompt: at least one token, after those that the caches hold.
      key: random key.
      temperature: divides the logits; 0 takes the likeliest token.
      top_p: only the likeliest tokens, whose probabilities add up to this, are sampled (nucleus sampling; Holtzman et
        al., 2020, arXiv:1904.09751).
      chunk: tokens of the prompt that are computed at once, as `PagedCache.pieces` cuts it.

    Yields:
      A token, and the caches that it was made from.

    Raises:
      ValueError: the prompt is empty, or there is no more room in the caches.
    """
    if not len(prompt):
        raise ValueError("expected a prompt of at least one token, got none")
    tokens, held = jnp.asarray(prompt, jnp.int32)[None], int(caches[0].lengths[0])
    room = min(cache.max_len for cache in caches)
    sampling = jnp.full(1, temperature, jnp.float32), jnp.full(1, top_p, jnp.float32)
    start, count = held, 0
    while True:
        end = start + tokens.shape[1]
        if end > room:
            raise ValueError(f"no room in the caches: {room} tokens are held")
        once, token = jax.random.fold_in(key, count)[None], tokens
        for stop in Grid(chunk, caches[0].sinks).pieces(start, end):
            piece, valid = padded(np.asarray(tokens[0, start - end :][: stop - start]), chunk)
            token, caches = next_tokens(decoder, piece, caches, *sampling, once, valid)
            start = stop
        tokens, count = token[:, None], count + 1
        yield int(token[0]), caches
        if int(token[0]) in decoder.config.eos_token_ids:
            return
