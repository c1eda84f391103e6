"""Sampling from a decoder, token by token."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.cache.kv import KVCache
from rqjax.cache.paged import CHUNK, pieces
from rqjax.nn.decoder import Decoder

SMALL = 8
"""The rest of a prompt takes the time of a chunk, or if it fits of this part of one."""


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
      chunk: tokens of the prompt that are computed at once. Attention sees tokens as they are at the end of their chunk.

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
        for stop in pieces(start, end, chunk, caches[0].sinks):
            piece, valid = padded(np.asarray(tokens[0, start - end :][: stop - start]), chunk)
            token, caches = next_tokens(decoder, piece, caches, *sampling, once, valid)
            start = stop
        tokens, count = token[:, None], count + 1
        yield int(token[0]), caches
        if int(token[0]) in decoder.config.eos_token_ids:
            return


def padded(piece: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """A row of one of three sizes with a piece of text at its end, so that few sizes are compiled, and its tokens."""
    size = next(size for size in (1, chunk // SMALL, chunk) if size >= len(piece))
    return np.pad(piece, (size - len(piece), 0))[None], np.array([len(piece)])


def _next_tokens(
    decoder: Decoder,
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
        rank = jnp.argsort(order, axis=-1)
        return jnp.where(jnp.take_along_axis(before, rank, axis=-1) < top_p[:, None], logits, -jnp.inf)

    kept = lax.cond((top_p < 1).any(), nucleus, lambda: logits)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(kept + temperature[:, None] * noise, axis=-1).astype(jnp.int32)  # a sample of kept / temperature
