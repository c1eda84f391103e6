"""A decoder on whole texts, layer by layer: only one layer is compiled where all are alike, whatever their number."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import rqjax
from rqjax.cache.key_forms import AS_GIVEN
from rqjax.nn import Decoder
from rqjax.nn.calibration import through
from rqjax.rotations import Rope


def exact(decoder: Decoder, tokens: Int[Array, "n time"]) -> Float[Array, "n time size"]:
    """Returns the last layer's output, normalized, with exact attention."""
    x = decoder.embedded(tokens)
    for layer in range(len(decoder.layers)):
        x, *_ = through(decoder, layer, x, AS_GIVEN)
    return decoder.norm(x)


def cached(
    decoder: Decoder, tokens: Int[Array, "n time"], caches: Sequence[rqjax.KVCache], chunk: int
) -> Float[Array, "n time size"]:
    """Returns the same where keys and values go through caches, which are given empty, a chunk of tokens at a time.

    It is what a decoder gives that is fed these chunks: a layer sees all that the layer before made of them.
    """
    x = decoder.embedded(tokens)
    for layer, cache in enumerate(caches):
        options = decoder.attention_options(layer)
        sinks, rope = options.pop("sink_logits"), decoder.config.ropes[layer]
        x = _layer(*nnx.split(decoder.layers[layer]), cache, x, sinks, rope, tuple(options.items()), chunk)
    return decoder.norm(x)


@functools.partial(jax.jit, static_argnames=("graph", "rope", "options", "chunk"))
def _layer(
    graph: Any,
    state: Any,
    cache: rqjax.KVCache,
    x: Float[Array, "n time size"],
    sinks: Float[Array, "q_heads"] | None,
    rope: Rope,
    options: tuple[tuple[str, Any], ...],
    chunk: int,
) -> Float[Array, "n time size"]:
    block, (n, time, size) = nnx.merge(graph, state), x.shape

    def step(cache: rqjax.KVCache, inputs: Any) -> Any:
        x, positions = inputs
        kept = []

        def attend(q: Array, k: Array, v: Array) -> Array:
            if cache.key_form.rope is None:
                q, k = (rope(y, positions[:, None]) for y in (q, k))
            value = None if cache.values_in_keys else v
            out, new = rqjax.dot_product_attention(q, k, value, cache, sink_logits=sinks, **dict(options))
            kept.append(new)
            return out

        x = block(x, attend)
        return kept[0], x

    chunks = jnp.moveaxis(x.reshape(n, -1, chunk, size), 1, 0), jnp.arange(time).reshape(-1, chunk)
    return jnp.moveaxis(jax.lax.scan(step, cache, chunks)[1], 0, 1).reshape(x.shape)
