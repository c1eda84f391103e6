"""The next token of texts: inputs of a decoder, sampling from its logits, and log-probabilities."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


BEST = 20
"""Most tokens whose log-probabilities one place of a text can have, as in vLLM."""


class Sampling(NamedTuple):
    """Numbers that say how a text is sampled, or arrays (batch,) of them; see `generate`."""

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any


def batched(rows: Sequence[Sampling]) -> Sampling:
    """Stacks the numbers of texts; all are exact in float32."""
    return Sampling(*np.asarray(rows, np.float32).T)


class Logprobs(NamedTuple):
    """Natural logarithms of the softmax of logits: of a place's own token, and of the likeliest ones in order."""

    own: Float[Array | np.ndarray, "*places"]
    best: Float[Array | np.ndarray, "*places best"]
    tokens: Int[Array | np.ndarray, "*places best"]


class Found(NamedTuple):
    """Tokens sampled from the logits of each sequence, and their log-probabilities."""

    tokens: Int[Array, "batch"]
    logprobs: Logprobs
    logits: Float[Array, "batch vocab"]


def _next_tokens(
    decoder: Callable[..., Any],
    tokens: Int[Array, "batch time"],
    caches: tuple[KVCache, ...],
    sampling: Sampling,
    keys: Array,
    wanted: Int[Array, "batch"],
    valid: Int[Array, "batch"] | None = None,
    slots: Int[Array, "batch"] | None = None,
) -> tuple[Found, tuple[KVCache, ...]]:
    logits, caches = decoder(tokens, caches, valid=valid, slots=slots, newest=1)
    return _chosen(logits[:, 0], sampling, keys, wanted), caches


def _scores(
    decoder: Callable[..., Any],
    tokens: Int[Array, "batch time"],
    caches: tuple[KVCache, ...],
    targets: Int[Array, "batch time"],
    wanted: Int[Array, "batch"],
    valid: Int[Array, "batch"],
    slots: Int[Array, "batch"],
) -> tuple[Logprobs, tuple[KVCache, ...]]:
    logits, caches = decoder(tokens, caches, valid=valid, slots=slots)
    return logprobs(logits, targets, wanted), caches


GRAPHS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_graph_min_graph_size": "1",
}
"""Options of XLA that put a step into one command buffer of a GPU, its conditions and loops included. The host launches
that alone and waits for no predicate. A loop that holds another one, as the Viterbi algorithm does, stays outside."""


@functools.cache
def compiled(function: Callable[..., Any], platform: str) -> Any:
    """Compiles a function of a decoder, tokens and caches for a platform; the caches are donated."""
    options: Any = GRAPHS if platform == "gpu" else None
    return jax.jit(function, donate_argnums=2, compiler_options=options)


def next_tokens(*args: Any, **options: Any) -> tuple[Found, tuple[KVCache, ...]]:
    """Returns what is `chosen` after each sequence, and the caches with `tokens` appended."""
    return compiled(_next_tokens, platforms.platform())(*args, **options)


def scores(*args: Any, **options: Any) -> tuple[Logprobs, tuple[KVCache, ...]]:
    """Returns `logprobs` of the target after each of `tokens`, and the caches with `tokens` appended."""
    return compiled(_scores, platforms.platform())(*args, **options)


def _chosen(logits: Float[Array, "batch vocab"], sampling: Sampling, keys: Array, wanted: Int[Array, "batch"]) -> Found:
    tokens = sampled(logits, sampling, keys)
    return Found(tokens, logprobs(logits, tokens, wanted), logits)


chosen = jax.jit(_chosen)
"""Samples a token for each row of logits, with a key of its own and log-probabilities as `wanted`."""


def sampled(logits: Float[Array, "batch vocab"], sampling: Sampling, keys: Array) -> Int[Array, "batch"]:
    """Samples a token from the logits of each sequence, with a key of its own."""
    temperature, top_p, top_k, min_p = sampling
    vocabulary = jnp.arange(logits.shape[1])

    def likeliest() -> Array:
        """Logits of the tokens that may be sampled. These are the first in order of their chances."""
        scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
        order = jnp.argsort(-scaled, axis=-1)
        chances = jnp.take_along_axis(jax.nn.softmax(scaled), order, axis=-1)
        kept = (vocabulary < jnp.where(top_k > 0, top_k, len(vocabulary))[:, None]) & (
            chances >= min_p[:, None] * chances[:, :1]
        )
        chances = jnp.where(kept, chances, 0)
        chances = chances / chances.sum(-1, keepdims=True)
        before = jnp.cumsum(chances, axis=-1) - chances
        kept &= (before < jnp.maximum(top_p, 1e-6)[:, None]) | (top_p >= 1)[:, None]  # sums may round above 1
        last = jnp.take_along_axis(order, kept.sum(-1, keepdims=True) - 1, axis=-1)
        least = jnp.take_along_axis(scaled, last, axis=-1)
        return jnp.where((scaled > least) | ((scaled == least) & (vocabulary <= last)), logits, -jnp.inf)

    some = (temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0))
    kept = lax.cond(some.any(), likeliest, lambda: logits)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    return jnp.argmax(kept + temperature[:, None] * noise, axis=-1).astype(jnp.int32)  # a sample of kept / temperature


def logprobs(
    logits: Float[Array, "batch *time vocab"], tokens: Int[Array, "batch *time"], wanted: Int[Array, "batch"]
) -> Logprobs:
    """Returns log-probabilities of tokens and of the best. As many of these are `wanted` at most: -1 is for no
    log-probabilities at all, 0 for those of the tokens alone. What nobody wants is zero and not computed."""
    count = min(BEST, logits.shape[-1])
    none = jnp.zeros((*tokens.shape, count), jnp.float32), jnp.zeros((*tokens.shape, count), jnp.int32)

    def some() -> Logprobs:
        found = jax.nn.log_softmax(logits)
        own = jnp.take_along_axis(found, tokens[..., None], axis=-1)[..., 0]
        return Logprobs(own, *lax.cond((wanted > 0).any(), lambda: (*lax.top_k(found, count),), lambda: none))

    return lax.cond((wanted >= 0).any(), some, lambda: Logprobs(none[0][..., 0], *none))


@jax.jit
def keys_of(seeds: Array, counts: Array) -> Array:
    """Makes a random key for each sequence, from its seed and the number of its tokens made so far."""
    return jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seeds, counts)
