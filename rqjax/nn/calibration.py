"""Quantizers fitted to the keys and values of a decoder at work, layer by layer."""

import functools
import inspect
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


def calibrated(decoder: Any, tokens: Int[Array, "n time"], name: str, key: Array) -> list[Strategy]:
    """`Decoder.calibrate`. One layer at a time is run and fitted, so that memory does not grow with their number."""
    (names, options), config = checked(name), decoder.config
    if tokens.ndim != 2 or tokens.size < config.head_dim:
        wanted = f"at least {config.head_dim} tokens (n, time), the dimensions of a head"
        raise ValueError(f"expected {wanted}, to calibrate with, got shape {tokens.shape}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        raise ValueError(f"expected tokens to be whole numbers below {config.vocab_size}, got {tokens.dtype} {tokens}")
    x, found = decoder.embedded(tokens), []
    for layer, block in enumerate(decoder.layers):
        graph, state = nnx.split(block)
        of_layer = config.ropes[layer], tuple(decoder.attention_options(layer).items())
        x, samples, mean = _through(graph, state, x, *of_layer, **options)
        keys, values = (
            _quantizer(part, side, jax.random.fold_in(key, layer), samples, layer)
            for part, side in ((names[0], "keys"), (names[-1], "values"))
        )
        found.append(Strategy(keys, values, mean, **options))
    return found


def _quantizer(name: str, side: str, key: Array, samples: dict[str, Array], layer: int) -> Quantizer:
    recipe, bits = with_bits(name)
    if recipe not in FITTED:
        return getattr(named(name, key, samples[side].shape[-1]), side)
    given = {"keys": ("queries",), "values": ("queries", "keys")}[side]
    taken = inspect.signature(FITTED[recipe]).parameters
    try:
        return FITTED[recipe](key, samples[side], bits, **{part: samples[part] for part in given if part in taken})
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
) -> tuple[Float[Array, "n time size"], dict[str, Float[Array, "heads m d"]], Float[Array, "heads d"] | None]:
    """What a layer makes of x, its keys, as they will be encoded, and values, the second moments of the queries that
    meet the keys of each head, and the mean that keys are less."""
    block, positions = nnx.merge(graph, state), jnp.arange(x.shape[1])[:, None]

    def one(x: Array) -> Any:
        seen = []

        def attend(q: Array, k: Array, v: Array) -> Array:
            turned = rope(q, positions)
            y = (q if pre_rope else turned)[0].astype(jnp.float32).reshape(len(positions), k.shape[2], -1, k.shape[3])
            seen.append(jnp.einsum("tkgd,tkge->kde", y, y, precision="highest") / (y.shape[0] * y.shape[2]))
            seen.extend(part[0].astype(jnp.float32) for part in (k, v))
            return exact_attention(turned, rope(k, positions), v, **dict(options))

        return block(x[None], attend)[0], seen

    x, (moments, keys, values) = jax.lax.map(one, x)  # (n, heads, d, d), (n, time, heads, d)
    keys = keys if turned or pre_rope else rope(keys, positions)
    mean = keys.mean(axis=(0, 1)) if centered or turned else None
    keys = keys if mean is None else keys - mean
    keys = rope(keys, positions) if turned and not pre_rope else keys
    heads_first = {"keys": jnp.moveaxis(keys, 2, 0), "values": jnp.moveaxis(values, 2, 0)}
    samples = {side: part.reshape(part.shape[0], -1, part.shape[-1]) for side, part in heads_first.items()}
    return x, {**samples, "queries": moments.mean(axis=0)}, mean
