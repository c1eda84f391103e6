"""The next token of texts: inputs of a decoder, and sampling from its logits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.cache.kv import KVCache
from rqjax.core import platforms

SMALL = 8
"""Divisor of a chunk: the rest of a prompt is padded to a chunk, or to this part of one if it fits."""


def padded(piece: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads a piece of text on the left to one of three sizes, so that few are compiled; also returns its length."""
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


GRAPHS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}
"""Options of XLA that put a step into one command buffer of a GPU, its conditions and loops included. The host launches
that alone and waits for no predicate. A loop that holds another one, as the Viterbi algorithm does, stays outside."""


@functools.cache
def next_tokens_on(platform: str) -> Any:
    """Returns `next_tokens` as it is compiled for a platform."""
    options: Any = GRAPHS if platform == "gpu" else None
    return jax.jit(_next_tokens, donate_argnums=2, compiler_options=options)


def next_tokens(*args: Any, **options: Any) -> tuple[Int[Array, "batch"], tuple[KVCache, ...]]:
    """Returns a token after each sequence, and the caches with `tokens` appended; the caches are donated."""
    return next_tokens_on(platforms.platform())(*args, **options)


def sampled(
    logits: Float[Array, "batch vocab"], temperature: Float[Array, "batch"], top_p: Float[Array, "batch"], keys: Array
) -> Int[Array, "batch"]:
    """Samples a token from the logits of each sequence, with a key of its own."""

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
    """Makes a random key for each sequence, from its seed and the number of its tokens made so far."""
    return jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seeds, counts)
