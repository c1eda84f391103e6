"""Quantizers fitted to the keys and values of a decoder at work, layer by layer."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rqjax.cache.key_forms import KeyForm
from rqjax.cache.kv import LastPart
from rqjax.cache.strategy import Strategy
from rqjax.core import Quantizer, random
from rqjax.nn.attention import Decoded, exact_attention
from rqjax.quantizers.combinators import Split
from rqjax.recipes.fitted import FITTED
from rqjax.recipes.strategies import checked, named, with_bits
from rqjax.rotations import Rope


def calibrated(decoder: Any, tokens: Int[Array, "n time"], name: str | Sequence[str], key: Array) -> list[Strategy]:
    """Fits strategies for `Decoder.calibrate`, one layer at a time: memory does not grow with the number of layers."""
    layers = len(decoder.layers)
    if not isinstance(name, str) and len(name) != layers:
        raise ValueError(f"expected {layers} names, one a layer, got {len(name)}")
    each_name = [name] * layers if isinstance(name, str) else name
    check_tokens(decoder, tokens)
    x, found = decoder.embedded(tokens), []
    for layer, (one, (names, form)) in enumerate([(one, checked(one)) for one in each_name]):
        sides = (names[0], "keys"), (names[-1], "values")
        queries = any("queries" in _asked(*pair) for pair in sides)
        x, samples, form = through(decoder, layer, x, form, queries=queries)
        latent = decoder.config.kv_lora_rank
        each = _parts(samples, latent) if latent else [samples, samples]
        made = []
        for (part, side), some in zip(sides, each, strict=True):
            some = some | ({"key_quantizer": made[0]} if made else {})
            made.append(_quantizer(part, side, random.fold_in(key, layer), some, layer))
        keys, values = made
        pair = (Split((keys, values)), LastPart()) if latent else (keys, values)
        found.append(Strategy(*pair, form, one))
    return found


def _parts(samples: dict[str, Array], latent: int) -> list[dict[str, Array]]:
    """Splits samples of latent attention: the coordinates that turn, and the latent, which is key and value."""
    keys, moments = samples["keys"], samples.get("queries")
    size = keys.shape[-1] - latent
    each = [{"keys": keys[..., part], "values": keys[..., part]} for part in (slice(size), slice(size, None))]
    if moments is not None:
        each[0]["queries"], each[1]["queries"] = moments[:, :size, :size], moments[:, size:, size:]
    return each


def check_tokens(decoder: Any, tokens: Int[Array, "n time"]) -> None:
    """Raises a ValueError for tokens that cannot be calibrated with."""
    config = decoder.config
    if tokens.ndim != 2 or tokens.size < config.head_dim:
        wanted = f"at least {config.head_dim} tokens (n, time), the dimensions of a head"
        raise ValueError(f"expected {wanted}, to calibrate with, got shape {tokens.shape}")
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        raise ValueError(f"expected tokens to be whole numbers below {config.vocab_size}, got {tokens.dtype} {tokens}")


def through(
    decoder: Any, layer: int, x: Float[Array, "n time size"], form: KeyForm, **given: Any
) -> tuple[Float[Array, "n time size"], dict[str, Float[Array, "heads _ d"]], KeyForm]:
    """Runs a layer on x, and returns its output, samples, and the form with the mean of these keys if it learns one.

    Samples are its keys, as they will be encoded, its values, and, with `queries`, the second moments of the queries
    that meet the keys of each head.

    Args:
      decoder: the decoder.
      layer: which of its layers.
      x: what the layer takes.
      form: of the keys, as a strategy has it.
      given: `queries`; `errors` of samples, as they are returned, that keys and values have in a cache of codes with
        this `window` and these `sinks`.
    """
    graph, state = nnx.split(decoder.layers[layer])
    options = decoder.attention_options(layer)
    sink_logits = options.pop("sink_logits")
    return _through(graph, state, x, sink_logits, form, decoder.config.ropes[layer], tuple(options.items()), **given)


def _asked(name: str, side: str) -> list[str]:
    """Returns the samples that a strategy's recipe takes beside its own side's."""
    recipe = with_bits(name)[0]
    taken = inspect.signature(FITTED[recipe]).parameters if recipe in FITTED else ()
    return [
        part for part in {"keys": ("queries",), "values": ("queries", "keys", "key_quantizer")}[side] if part in taken
    ]


def _quantizer(name: str, side: str, key: Array, samples: dict[str, Any], layer: int) -> Quantizer:
    recipe, bits = with_bits(name)
    if recipe not in FITTED:
        return getattr(named(name, key, samples[side].shape[-1]), side)
    try:
        return FITTED[recipe](key, samples[side], bits, **{part: samples[part] for part in _asked(name, side)})
    except ValueError as error:
        raise ValueError(f"{side} of layer {layer}: {error}") from None


@functools.partial(jax.jit, static_argnames=("graph", "rope", "options", "queries", "window", "sinks"))
def _through(
    graph: Any,
    state: Any,
    x: Float[Array, "n time size"],
    sink_logits: Float[Array, "q_heads"] | None,
    form: KeyForm,
    rope: Rope,
    options: tuple[tuple[str, Any], ...],
    *,
    queries: bool = False,
    errors: dict[str, Float[Array, "heads m d"]] | None = None,
    window: int = 0,
    sinks: int = 0,
) -> Any:
    """Computes `through` for a layer that is split into graph and state."""
    block, positions = nnx.merge(graph, state), jnp.arange(x.shape[1])[:, None]
    placed = form.at(rope)

    def one(inputs: Any) -> Any:
        x, wrong = inputs
        seen = {}

        def attend(q: Array, k: Array, v: Array) -> Array:
            at_positions = rope(q, positions)
            seen.update({side: part[0].astype(jnp.float32) for side, part in (("keys", k), ("values", v))})
            if queries:
                asked = (q if form.turns_late else at_positions)[0].astype(jnp.float32)
                y = asked.reshape(len(positions), k.shape[2], -1, k.shape[3])
                moments = jnp.einsum("tkgd,tkge->kde", y, y, precision="highest")
                seen["queries"] = moments / (y.shape[0] * y.shape[2])
            k, decoded = rope(k, positions), None
            if wrong:
                changes = placed.change(wrong["keys"], positions), wrong["values"]
                keys, values = (x + change.astype(x.dtype) for x, change in zip((k, v), changes, strict=True))
                decoded = Decoded(keys, values, window, sinks)
            return exact_attention(at_positions, k, v, sink_logits=sink_logits, decoded=decoded, **dict(options))

        return block(x[None], attend)[0], seen

    by_sequence = {
        side: jnp.moveaxis(part.reshape(part.shape[0], *x.shape[:2], -1), 0, 2) for side, part in (errors or {}).items()
    }
    x, seen = jax.lax.map(one, (x, by_sequence))  # keys and values (n, time, heads, d), queries (n, heads, d, d)
    # Rotated, and perhaps back again, as a cache does to keys.
    keys, values = (jnp.moveaxis(part, 2, 1) for part in (rope(seen["keys"], positions), seen["values"]))
    if form.learned:
        known = {"mean": placed.average(keys, positions[:, 0]).mean(axis=0), "learned": False}
        form, placed = form.changed(**known), placed.changed(**known)
    sides = {"keys": placed.encode_form(keys, positions[:, 0]), "values": values}
    samples = {side: jnp.swapaxes(part, 0, 1).reshape(part.shape[1], -1, part.shape[3]) for side, part in sides.items()}
    return x, samples | ({"queries": seen["queries"].mean(axis=0)} if queries else {}), form
