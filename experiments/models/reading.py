"""Texts of different lengths that a decoder reads into its caches in chunks, and the likeliest tokens after them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rqjax import KVCache
from rqjax.nn import Decoder


def padded(texts: Sequence[Sequence[int]], chunk: int) -> Int[np.ndarray, "batch time"]:
    """Pads texts on the left, to a power of two of chunks, so that few shapes are compiled."""
    chunks = -(-max(map(len, texts)) // chunk)
    tokens = np.zeros((len(texts), chunk << (chunks - 1).bit_length()), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[len(row) - len(text) :] = text
    return tokens


def chunked(tokens: Array, counts: Array | np.ndarray, chunk: int) -> tuple[Array, Array]:
    """Returns tokens (chunks, batch, chunk), and how many of them count: the last `counts` of each sequence."""
    batch, time = tokens.shape
    before = time - counts - jnp.arange(0, time, chunk)[:, None]  # padding from the beginning of each chunk on
    return jnp.moveaxis(tokens.reshape(batch, -1, chunk), 1, 0), jnp.clip(chunk - before, 0, chunk)


@functools.partial(jax.jit, static_argnames="chunk")
def read(
    decoder: Decoder,
    caches: tuple[KVCache, ...],
    tokens: Int[Array | np.ndarray, "batch time"],
    counts: Int[Array | np.ndarray, "batch"],
    chunk: int,
) -> tuple[Int[Array, "batch 1"], tuple[KVCache, ...]]:
    """Returns the likeliest token after each text, and the caches that have read it."""

    def step(caches: Any, inputs: Any) -> Any:
        logits, caches = decoder(inputs[0], caches, valid=inputs[1], newest=1)
        return caches, logits.argmax(-1)

    caches, found = jax.lax.scan(step, caches, chunked(jnp.asarray(tokens), counts, chunk))
    return found[-1], caches


@functools.partial(jax.jit, donate_argnums=1)
def follow(
    decoder: Decoder, caches: tuple[KVCache, ...], tokens: Int[Array, "batch 1"]
) -> tuple[Int[Array, "batch 1"], tuple[KVCache, ...]]:
    logits, caches = decoder(tokens, caches, newest=1)
    return logits.argmax(-1), caches
