"""Sampling from a decoder, token by token."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from rqjax.cache.kv import KVCache
from rqjax.core import check_int
from rqjax.nn.decoder import Decoder
from rqjax.nn.requests import checked_prompt, checked_sampling
from rqjax.nn.sampling import batched, next_tokens, padded
from rqjax.paging.pages import CHUNK, Grid


def generate(
    decoder: Decoder,
    caches: Sequence[KVCache],
    prompt: Any,
    *,
    key: Array,
    temperature: Any = 1.0,
    top_p: Any = 1.0,
    top_k: Any = 0,
    min_p: Any = 0.0,
    chunk: int = CHUNK,
) -> Iterator[tuple[int, tuple[KVCache, ...]]]:
    """Yields tokens after a prompt, until one ends the text or the caller stops asking.

    All arguments are checked when it is called, before anything is computed.

    Args:
      decoder: the decoder.
      caches: its caches, for one sequence, without pages; donated.
      prompt: at least one token, after those that the caches hold: whole numbers (time,) or (1, time).
      key: random key.
      temperature: divides the logits; 0 takes the likeliest token; at most 1e6.
      top_p: only the likeliest tokens, whose probabilities add up to this, are sampled (nucleus sampling; Holtzman et
        al., 2020, arXiv:1904.09751); above 0 and at most 1. It counts among those that `top_k` and `min_p` leave.
      top_k: only so many of the likeliest tokens are sampled; 0: all.
      min_p: only tokens of at least this part of the likeliest one's probability are sampled; from 0 to 1. All three
        take probabilities after division by the temperature.
      chunk: tokens of the prompt that are computed at once, as `PagedCache.pieces` cuts it.

    Yields:
      A token, and the caches that it was made from.

    Raises:
      ValueError: the prompt is empty, of several texts or of tokens that there are not; the sampling is of no
        probabilities; the caches are not this decoder's for one sequence; or there is no more room in them.

    Example:
      >>> import jax
      >>> from rqjax.nn import generate, load_decoder
      >>> decoder = load_decoder("results/models/qwen2-d64")
      >>> caches = decoder.caches("eden_4", jax.random.key(0), batch=1, max_len=256)
      >>> tokens = generate(decoder, caches, range(60, 90), key=jax.random.key(1), temperature=0.7)
      >>> len([next(tokens)[0] for _ in range(8)])
      8
    """
    text = checked_prompt(prompt, decoder.config.vocab_size)
    sampling = batched([checked_sampling(temperature, top_p, top_k, min_p)])
    chunk = check_int("chunk", chunk, 1, 2**20)
    decoder.check_caches(caches, 1)
    for cache in caches:
        if cache.tables is not None:
            raise ValueError("expected caches without pages, whose book an Engine keeps")
        cache.check()
    try:
        jax.random.fold_in(key, 0)
    except (TypeError, ValueError):
        raise ValueError(f"expected one key of jax.random.key, got {type(key).__name__} {np.shape(key)}") from None
    held, room = int(caches[0].lengths[0]), min(cache.max_len for cache in caches)
    _check_room(held + len(text), room)

    def tokens(caches: tuple[KVCache, ...]) -> Iterator[tuple[int, tuple[KVCache, ...]]]:
        piece, start, count = text, held, 0
        while True:
            end = start + len(piece)
            _check_room(end, room)
            once, token = jax.random.fold_in(key, count)[None], np.array([0])
            for stop in Grid(chunk, caches[0].sinks).pieces(start, end):
                row, valid = padded(piece[len(piece) - end + start :][: stop - start], chunk)
                found, caches = next_tokens(decoder, row, caches, sampling, once, np.array([-1]), valid)
                token, start = found.tokens, stop
            piece, count = np.asarray(token), count + 1
            yield int(piece[0]), caches
            if int(piece[0]) in decoder.config.eos_token_ids:
                return

    return tokens(tuple(caches))


def _check_room(tokens: int, room: int) -> None:
    if tokens > room:
        raise ValueError(f"no room in the caches: {room} tokens are held")
