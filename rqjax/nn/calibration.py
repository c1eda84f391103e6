"""Quantizers fitted to the keys and values of a decoder at work, layer by layer."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rqjax.cache.strategies import Strategy, checked, named, with_bits
from rqjax.core import Quantizer
from rqjax.nn.attention import exact_attention
from rqjax.recipes.fitted import FITTED
from rqjax.rotations import Rope


def calibrated(decoder: Any, tokens: Int[Array, "n time"], name: str | Sequence[str], key: Array) -> list[Strategy]:
    """`Decoder.calibrate`. One layer at a time is run and fitted, so that memory does not grow with their number."""
    layers = len(decoder.layers)
    if not isinstance(name, str) and len(name) != layers:
        raise ValueError(f"expected {layers} names, one a layer, got {len(name)}")
    parts = [checked(one) for one in ([name] * layers if isinstance(name, str) else name)]
    check_tokens(decoder, tokens)
    x, found = decoder.embedded(tokens), []
    for layer, (names, options) in enumerate(parts):
        x, samples, mean = through(decoder, layer, x, **options)
        keys, values = (
            _quantizer(part, side, jax.random.fold_in(key, layer), samples[side], layer)
            for part, side in ((names[0], "keys"), (names[-1], "values"))
        )
        found.append(Strategy(keys, values, mean, **options))
    return found


def check_tokens(decoder: Any, tokens: Int[Array, "n time"]) -> None:
    """Raises a ValueError for what is no text to calibrate with."""
    config = decoder.config
    if tokens.ndim != 2 or tokens.size < config.head_dim:
        wanted = f"at least {config.head_dim} tokens (n, time), the dimensions of a head"
        raise ValueError(f"expected {wanted}, to calibrate with, got shape {tokens.shape}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        raise ValueError(f"expected tokens to be whole numbers below {config.vocab_size}, got {tokens.dtype} {tokens}")


def through(
    decoder: Any, layer: int, x: Float[Array, "n time size"], **given: Any
) -> tuple[Float[Array, "n time size"], dict[str, Float[Array, "heads m d"]], Float[Array, "heads d"] | None]:
    """What a layer makes of x, its keys, as they will be encoded, and values, and the mean that keys are less.

    Args:
      decoder: the decoder.
      layer: which of its layers.
      x: what the layer takes.
      given: the options of a strategy; the `mean` of keys, if it is known; `errors` of samples, as they are returned,
        with which the layer is to attend.
    """
    graph, state = nnx.split(decoder.layers[layer])
    of_layer = decoder.config.ropes[layer], tuple(decoder.attention_options(layer).items())
    return _through(graph, state, x, *of_layer, **given)


def _quantizer(name: str, side: str, key: Array, samples: Float[Array, "heads n d"], layer: int) -> Quantizer:
    recipe, bits = with_bits(name)
    if recipe not in FITTED:
        return getattr(named(name, key, samples.shape[-1]), side)
    try:
        return FITTED[recipe](key, samples, bits)
    except ValueError as error:
        raise ValueError(f"{side} of layer {layer}: {error}") from None


@functools.partial(jax.jit, static_argnames=("graph", "rope", "options", "centered", "turned", "pre_rope"))
def _through(
    graph: Any,
    state: Any,
    x: Float[Array, "n time size"],
    rope: Rope,
    options: tuple[tuple[str, Any], ...],
    *,
    centered: bool = False,
    turned: bool = False,
    pre_rope: bool = False,
    mean: Float[Array, "heads d"] | None = None,
    errors: dict[str, Float[Array, "heads m d"]] | None = None,
) -> Any:
    """`through`."""
    block, positions = nnx.merge(graph, state), jnp.arange(x.shape[1])[:, None]

    def one(inputs: Any) -> Any:
        x, wrong = inputs
        seen = []

        def attend(q: Array, k: Array, v: Array) -> Array:
            seen.extend(part[0].astype(jnp.float32) for part in (k, v))
            q, k = rope(q, positions), rope(k, positions)
            if wrong:
                k = k + (rope(wrong["keys"], positions) if pre_rope else wrong["keys"]).astype(k.dtype)
                v = v + wrong["values"].astype(v.dtype)
            return exact_attention(q, k, v, **dict(options))

        return block(x[None], attend)[0], seen

    by_sequence = {
        side: jnp.moveaxis(part.reshape(part.shape[0], *x.shape[:2], -1), 0, 2) for side, part in (errors or {}).items()
    }
    x, (keys, values) = jax.lax.map(one, (x, by_sequence))  # (n, time, heads, d)
    keys = keys if turned or pre_rope else rope(keys, positions)
    mean = keys.mean(axis=(0, 1)) if mean is None and (centered or turned) else mean
    keys = keys if mean is None else keys - mean
    keys = rope(keys, positions) if turned and not pre_rope else keys
    heads_first = {"keys": jnp.moveaxis(keys, 2, 0), "values": jnp.moveaxis(values, 2, 0)}
    return x, {side: part.reshape(part.shape[0], -1, part.shape[-1]) for side, part in heads_first.items()}, mean
