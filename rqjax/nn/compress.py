"""Compressed caches under other engines, which pass a cache through as a pytree: google-tunix's and gemma's samplers.

A compressed model is one of a subclass of its own class: attention with a cache is rqjax's, all else the engine's.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Float, Int

from rqjax.cache.attention import dot_product_attention
from rqjax.cache.strategy import Strategy
from rqjax.nn.opaque import Opaque, empty_caches
from rqjax.recipes.strategies import for_layers
from rqjax.rotations import Rope

TUNIX = {f"tunix.models.{name}.model": name for name in ("llama3", "qwen2", "qwen3", "gemma", "gemma3")}
GEMMA = "gemma.gm.nn._transformer"
SUPPORTED = f"{', '.join(TUNIX.values())} of google-tunix, Gemma 2 and 3 of gemma"
THETA = ("base_frequency", "rope_theta", "max_wavelength")
"""Names of theta in functions for rotary positions."""


def compress(model: Any, strategy: str | Sequence[Strategy], key: Array, **options: Any) -> Any:
    """A model of another engine whose samplers keep its keys and values compressed; nothing else changes.

    Engines and models: google-tunix 0.1.7 with Llama 3, Qwen 2, Qwen 3, Gemma and Gemma 3 (`tunix.generate.sampler`,
    beams too), and gemma 4.0.1 with Gemma 2 and 3 (`gm.text.Sampler`, `gm.text.ChatSampler`). Text alone: where there
    are images, tokens see later ones. Without a cache, as in training, the model computes what it did.

    Args:
      model: of one of these engines. It is left as it is; weights are shared, not copied.
      strategy: as in `rqjax.strategy`, with "+turned" and "+pre_rope": each layer has its own random rotation; or a
        strategy for each layer, such as `Decoder.calibrate` gives for the same weights.
      key: random key.
      **options: as in `KVCache.init`.

    Returns:
      The model for the engine's sampler: one of a subclass of its class, with the same weights by the same names.

    Raises:
      TypeError: the model is of no engine, or of no model, that is supported; the message names those that are.
      UnknownName: there is no such strategy; the nearest names are given.
      ValueError: there are not as many strategies as layers, or a call with a cache is given images.

    Example:
      >>> import jax, rqjax.nn
      >>> try:
      ...     rqjax.nn.compress("llama", "eden_3", jax.random.key(0))
      ... except TypeError as error:
      ...     print(error)  # doctest: +ELLIPSIS
      expected a model of llama3, qwen2, qwen3, gemma, gemma3 of google-tunix, ..., got builtins.str

    Source: google/tunix and google-deepmind/gemma on GitHub, whose samplers take any pytree as a cache.
    """
    for kind in type(model).__mro__:
        if kind.__module__ in TUNIX:
            return _tunix(model, sys.modules[kind.__module__], strategy, key, options)
        if kind.__module__ == GEMMA:
            return _gemma(model, strategy, key, options)
    raise TypeError(f"expected a model of {SUPPORTED}, got {type(model).__module__}.{type(model).__name__}")


def _tunix(model: Any, module: Any, name: str | Sequence[Strategy], key: Array, options: dict[str, Any]) -> Any:
    """Compresses a model of google-tunix, whose class is in `module`. Its prompts are padded on the left."""
    base = type(model.layers[0].attn)
    signature = inspect.signature(base.block)

    def rope_options(attn: Any) -> dict[str, Any]:
        names = {"base_frequency": "rope_base_frequency", "scale_factor": "rope_scale_factor"}
        return {name: getattr(attn, of) for name, of in names.items() if hasattr(attn, of)}

    def rope(attn: Any) -> Rope:
        if hasattr(module, "apply_rotary_embedding"):
            return Rope(float(model.config.rope_theta))
        parameters = inspect.signature(module.apply_rope).parameters.items()
        given = {name: parameter.default for name, parameter in parameters} | rope_options(attn)
        theta = next(given[name] for name in THETA if name in given)
        return Rope(float(theta), "linear", (float(given.get("scale_factor", 1.0)),))

    class Attention(base):
        def block(self, *args: Any, **kwargs: Any) -> tuple[Any, Array]:
            given = signature.bind(self, *args, **kwargs).arguments
            if given["cache"] is None:
                return super().block(*args, **kwargs)

            def turned(y: Array) -> Array:
                if "sin" in given:
                    return module.apply_rotary_embedding(y, given["sin"], given["cos"])
                return module.apply_rope(y, given["segment_pos"], head_dim=self.head_dim, **rope_options(self))

            cache = given["cache"].cache
            q, k, v = _projected(self, given["x"], lambda layer, _, x: layer(x))
            q, k = (q, k) if cache.key_form.rope else (turned(q), turned(k))
            # The last query sees all tokens that count, those that the cache has and those of this call.
            valid = given["attn_mask"][:, -1].sum(-1) - cache.lengths
            out, cache = dot_product_attention(q, k, v, cache, valid=valid, **_attention_options(self))
            out = out.astype(given["x"].dtype)
            out = self.o_proj(out) if hasattr(self, "o_proj") else self.attn_vec_einsum(out)
            return Opaque.of(cache, given["cache"].quantizers), out

    attentions = [layer.attn for layer in model.layers]
    empty = empty_caches(
        for_layers(name, key, len(attentions), attentions[0].head_dim),
        [rope(attn) for attn in attentions],
        [_attention_options(attn)["sliding_window"] for attn in attentions],
        [attn.num_kv_heads for attn in attentions],
        options,
    )

    class Compressed(type(model)):
        __call__ = _of_text(type(model).__call__)

        def init_cache(self, batch_size: int, cache_size: int, dtype: Any) -> dict[str, Opaque]:
            return empty(batch_size, cache_size)

    compressed = nnx.merge(*nnx.split(model))
    for layer in compressed.layers:
        layer.attn.__class__ = Attention
    compressed.__class__ = Compressed
    return compressed


def _gemma(model: Any, name: str | Sequence[Strategy], key: Array, options: dict[str, Any]) -> Any:
    """Compresses a model of gemma. Its prompts are padded on the right, and the last token of a prompt is fed twice."""
    from gemma.gm.math import _positional_embeddings
    from gemma.gm.nn import _modules
    from kauldron import kd

    base, config = type(model), model.config
    signature = inspect.signature(_modules.Attention.__call__)

    def attend(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], context: Any) -> Any:
        attn = context.module
        if not isinstance(attn, _modules.Attention) or context.method_name != "__call__":
            return call(*args, **kwargs)
        _, x, positions, held, _ = signature.bind(attn, *args, **kwargs).arguments.values()
        if held is None:
            return call(*args, **kwargs)
        cache = held["k"].cache
        # The newest token of a sequence is forgotten where it is fed again: the ring of tokens in full precision
        # reaches back to what was encoded last.
        cache = dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths, positions[:, 0]))
        q, k, v = _projected(attn, x, lambda layer, equation, x: layer(equation, x))
        if cache.key_form.rope is None:
            of_layer = {"base_frequency": attn.rope_base_frequency, "scale_factor": attn.rope_scale_factor}
            q, k = (_positional_embeddings.apply_rope(y, positions, **of_layer) for y in (q, k))
        valid = positions[:, -1] + 1 - cache.lengths
        padding = x.shape[1] - valid
        q, k, v = (_moved(y, padding) for y in (q, k, v))
        out, cache = dot_product_attention(q, k, v, cache, valid=valid, **_attention_options(attn))
        out = attn.attn_vec_einsum("BTNH,NHD->BTD", _moved(out, -padding).astype(x.dtype))
        opaque = Opaque.of(cache, held["k"].quantizers)
        return {**held, "k": opaque, "end_index": held["end_index"] + x.shape[1]}, out

    local = Rope(float(config.local_base_frequency), "linear", (float(config.local_scale_factor),))
    whole = Rope(float(config.global_base_frequency), "linear", (float(config.global_scale_factor),))
    kinds = [kind == _modules.AttentionType.LOCAL_SLIDING for kind in config.attention_types]
    empty = empty_caches(
        for_layers(name, key, config.num_layers, config.head_dim),
        [local if kind else whole for kind in kinds],
        [config.sliding_window_size if kind else None for kind in kinds],
        [config.num_kv_heads] * config.num_layers,
        options,
    )

    class Compressed(base):
        @_of_text
        @functools.wraps(base.__call__)
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with linen.intercept_methods(attend):
                return super().__call__(*args, **kwargs)

        def init_cache(self, *, batch_size: int, dtype: Any, cache_length: int, sharding: Any = None) -> Any:
            nothing = Opaque(())
            caches = {
                layer: {"k": opaque, "v": nothing, "positions": nothing, "end_index": jnp.zeros(batch_size, jnp.int32)}
                for layer, opaque in empty(batch_size, cache_length).items()
            }
            return kd.sharding.with_sharding_constraint(caches, sharding)

    fields = [field.name for field in dataclasses.fields(model) if field.init and field.name not in ("parent", "name")]
    return Compressed(**{name: getattr(model, name) for name in fields})


def _projected(attn: Any, x: Array, einsum: Callable[[Any, str, Array], Array]) -> tuple[Array, Array, Array]:
    """Queries, keys and values (batch, time, heads, head_dim) before rotary positions."""
    if hasattr(attn, "q_proj"):
        q, k, v = (project(x) for project in (attn.q_proj, attn.k_proj, attn.v_proj))
    elif attn.use_qkv_einsum:
        q, k, v = einsum(attn.qkv_einsum, "BTD,SNDH->SBTNH", x)
    else:
        q = einsum(attn.q_einsum, "BTD,NDH->BTNH", x)
        k, v = einsum(attn.kv_einsum, "BSD,CKDH->CBSKH", x)
    if hasattr(attn, "q_bias"):
        biases = (bias[...].astype(x.dtype) for bias in (attn.q_bias, attn.k_bias, attn.v_bias))
        q, k, v = (y + bias.reshape(y.shape[2:]) for y, bias in zip((q, k, v), biases, strict=True))
    for of_q, of_k in (("q_norm", "k_norm"), ("_query_norm", "_key_norm")):
        if hasattr(attn, of_q):
            q, k = getattr(attn, of_q)(q), getattr(attn, of_k)(k)
    return q, k, v.astype(k.dtype)


def _attention_options(attn: Any) -> dict[str, Any]:
    """Scale, window and soft limit, as `rqjax.attend` takes them."""
    scales = [getattr(attn, name) for name in ("scale", "query_pre_attn_scalar") if hasattr(attn, name)]
    local = hasattr(attn, "attn_type") and attn.attn_type.name == "LOCAL_SLIDING"
    return {
        "scale": scales[0] if scales else attn.head_dim**-0.5,
        "sliding_window": attn.sliding_window_size if local else None,
        "softcap": getattr(attn, "attn_logits_soft_cap", None),
    }


def _moved(x: Float[Array, "batch time heads dim"], count: Int[Array, "batch"]) -> Float[Array, "batch time heads dim"]:
    """Rolls each sequence by its own number of tokens to the right."""
    time = x.shape[1]
    index = (jnp.arange(time) - count[:, None]) % time
    return jnp.take_along_axis(x, index[:, :, None, None], axis=1)


def _of_text(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's call, so that it refuses images if there is a cache."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("images") is not None and given.get("cache") is not None:
            raise ValueError("expected text alone with a compressed cache, got images, whose tokens see later ones")
        return call(self, *args, **kwargs)

    return checked
