"""A decoder of one of many families (`families`) that attends through any cache, compressed or not.

Modules and parameters have the names, and weights the orientation (out, in), of Hugging Face's checkpoints.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from rqjax.cache.append import checked_slots, checked_valid
from rqjax.cache.kv import KVCache
from rqjax.cache.strategy import Strategy
from rqjax.core import check_int, check_ints, nbytes
from rqjax.nn.attention import exact_attention
from rqjax.nn.calibration import calibrated
from rqjax.nn.compat import jittable, listed
from rqjax.nn.config import DecoderConfig
from rqjax.nn.experts import Mixture
from rqjax.nn.heads import attention, empty, everyone
from rqjax.nn.latent import LatentAttention
from rqjax.nn.layers import MLP, Embedding, Linear, RMSNorm, product, scaled
from rqjax.recipes.strategies import for_layers

Attend: TypeAlias = Callable[[Array, Array, Array], Array]
"""Attention of a layer: queries, keys and values of the new tokens, (batch, time, heads, head_dim), to outputs. Queries
and keys are those before rotary positions: `Decoder.turned` turns them."""
Tokens: TypeAlias = Shaped[Array | np.ndarray, "..."]
"""Whole numbers (batch, time)."""


class Attention(nnx.Module):
    """Projections around an attention function that is given with each call."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        dim, size = config.head_dim, config.hidden_size
        outer, kv_outer = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.q_proj = Linear(size, outer, bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(size, kv_outer, bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(size, kv_outer, bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(outer, size, bias=config.out_bias, rngs=rngs, dtype=dtype)
        self.sinks = nnx.Param(jnp.zeros(config.num_attention_heads, dtype)) if config.traits.sinks else None
        self.dim, self.qk_norm = dim, config.traits.qk_norm
        whole = self.qk_norm == "whole"
        self.q_norm = RMSNorm(outer if whole else dim, config, dtype) if self.qk_norm else None
        self.k_norm = RMSNorm(kv_outer if whole else dim, config, dtype) if self.qk_norm else None

    @property
    def to_cache(self) -> tuple[Linear, ...]:
        """Projections that make what a cache holds."""
        return self.k_proj, self.v_proj

    def __call__(self, x: Float[Array, "batch time size"], attend: Attend) -> Array:
        q, k, v = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm == "whole":
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        q, k, v = (part.reshape(*x.shape[:2], -1, self.dim) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        return self.o_proj(attend(q, k, v).reshape(*x.shape[:2], -1))


class Block(nnx.Module):
    """Attention, then an MLP or experts, normalized before or behind or both. Norms are named as in Llama, or as in
    Gemma if there are norms behind."""

    def __init__(self, config: DecoderConfig, mixture: bool, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.self_attn = (LatentAttention if config.traits.latent else Attention)(config, rngs=rngs, dtype=dtype)
        self.mlp = (Mixture if mixture else MLP)(config, rngs=rngs, dtype=dtype)
        family, self.scale = config.traits, config.residual_scale

        def norm(there: bool) -> RMSNorm | None:
            return RMSNorm(config.hidden_size, config, dtype) if there else None

        self.behind = family.norm_behind
        self.input_layernorm = norm(family.norm_before)
        self.post_attention_layernorm = norm(True)
        self.pre_feedforward_layernorm = norm(family.norm_before and family.norm_behind)
        self.post_feedforward_layernorm = norm(family.norm_behind)

    def __call__(self, x: Float[Array, "batch time size"], attend: Attend) -> Array:
        after, second = self.post_attention_layernorm, self.pre_feedforward_layernorm
        if not self.behind:
            after, second = None, after
        x = x + scaled(_normed(after, self.self_attn(_normed(self.input_layernorm, x), attend)), self.scale)
        return x + scaled(_normed(self.post_feedforward_layernorm, self.mlp(_normed(second, x))), self.scale)


def _normed(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


@jittable
class Decoder(nnx.Module):
    """Tokens to logits.

    The weights' dtype is that of the computation; norms, rotary angles, attention and logits are of float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rqjax.nn import load_decoder
      >>> decoder = load_decoder("results/models/qwen2-d64")
      >>> caches = decoder.caches("eden_4", jax.random.key(0), batch=1, max_len=256)
      >>> logits, caches = decoder(jnp.arange(60, 80)[None], caches, newest=1)
      >>> (logits.shape, caches[0].lengths.tolist())
      ((1, 1, 256), [20])
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """A decoder with random weights; see `rqjax.nn.load_decoder` for those of a checkpoint."""
        self.config = config
        self.sharding: NamedSharding | None = None
        """Sharding of heads, if the decoder is on a mesh."""
        self.embed_tokens = Embedding(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)
        mixtures = config.mixtures or [False] * config.num_hidden_layers
        self.layers = listed([Block(config, mixture, rngs=rngs, dtype=dtype) for mixture in mixtures])
        self.norm = RMSNorm(config.hidden_size, config, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        tokens: Tokens,
        caches: Sequence[KVCache] | None = None,
        *,
        valid: Shaped[Array | np.ndarray, "..."] | None = None,
        slots: Shaped[Array | np.ndarray, "..."] | None = None,
        newest: int | None = None,
    ) -> tuple[Float[Array, "batch newest vocab"], tuple[KVCache, ...]]:
        """Returns logits of the token after each, and the caches with the new tokens.

        Args:
          tokens: whole numbers (batch, time), after those that the caches hold. Caches take none that the vocabulary
            does not have; under jit, where this is not known, and without caches the logits of its text are NaN.
          caches: one for each layer, of `caches`; without them attention is exact, over these tokens alone.
          valid: how many tokens of each sequence count, the last ones (padding is on the left); needs caches.
          slots: of caches with pages, which of their sequences these are; all, if not given.
          newest: of how many of the last tokens logits are made; of all, if not given.

        Raises:
          ValueError: tokens, `valid` or `slots` are of another kind, shape or range; the caches are not this decoder's
            or have no room; or there are fewer tokens than `newest`.
        """
        tokens = jnp.asarray(check_ints("tokens", tokens))
        if tokens.ndim != 2:
            raise ValueError(f"expected tokens (batch, time), got shape {tokens.shape}")
        batch, time = tokens.shape
        newest = time if newest is None else check_int("newest", newest, 1, time)
        kept: list[KVCache] = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            options = self.attention_options(layer)
            if caches is None or caches[layer].key_form.rope is None:
                q, k = self.turned(layer, positions, q, k)
            if caches is None:
                return exact_attention(q, k, v, **options)
            value = None if caches[layer].values_in_keys else v
            out, cache = attention(self.sharding, q, k, value, caches[layer], valid, slots, **options)
            kept.append(cache)
            return out

        if caches is None:
            if valid is not None or slots is not None:
                raise ValueError("valid needs caches" if slots is None else "slots need caches")
            before = jnp.zeros((batch, 1), jnp.int32)
        else:
            self.check_caches(caches, batch if slots is None else None)
            slots = checked_slots(caches[0], slots)
            lengths = caches[0].lengths if slots is None else caches[0].lengths[slots]
            if len(lengths) != batch:
                raise ValueError(f"expected tokens of {len(lengths)} slots, got {batch} rows")
            if valid is not None:
                valid = checked_valid(valid, batch, time)
                tokens = jnp.where(jnp.arange(time) < time - valid[:, None], 0, tokens)  # padding may be any number
            check_ints("tokens", tokens, self.config.vocab_size - 1)
            before = (lengths - (0 if valid is None else time - valid))[:, None]
        positions = before + jnp.arange(time)
        x = self.hidden(tokens, attend)
        return self.logits(x[:, time - newest :]), tuple(kept)

    def check_caches(self, caches: Sequence[KVCache], batch: int | None) -> None:
        """Raises a ValueError for caches of another decoder, or not of `batch` sequences."""
        config = self.config
        if len(caches) != config.num_hidden_layers:
            raise ValueError(f"expected {config.num_hidden_layers} caches, one a layer, got {len(caches)}")
        wanted = config.num_key_value_heads, config.head_dim
        for layer, cache in enumerate(caches):
            sequences, heads, _, dim = cache.exact_keys.shape
            if (heads, dim) != wanted:
                raise ValueError(f"expected caches of {wanted[0]} heads of {wanted[1]}, got {heads} of {dim}")
            if batch not in (None, sequences):
                raise ValueError(f"expected caches of {batch} sequences, as the tokens, got {sequences}")
            if cache.values_in_keys and not config.kv_lora_rank:
                raise ValueError(f"expected caches with values of their own in layer {layer}, got values in keys")
            if (rope := cache.key_form.rope) not in (None, config.ropes[layer]):
                raise ValueError(f"expected caches with {config.ropes[layer]} in layer {layer}, got {rope}")

    def hidden(
        self, tokens: Tokens, attend: Callable[[int, Array, Array, Array], Array]
    ) -> Float[Array, "batch time size"]:
        """Returns the last layer's output, normalized. `attend` takes a layer's number, then what `Attend` takes."""
        x = self.embedded(tokens)
        for layer, block in enumerate(self.layers):
            x = block(x, functools.partial(attend, layer))
        return self.norm(x)

    def embedded(self, tokens: Tokens) -> Float[Array, "batch time size"]:
        """Returns the input of the first layer."""
        return scaled(self.embed_tokens(jnp.asarray(tokens)), self.config.embedding_scale)

    def logits(self, x: Float[Array, "batch time size"]) -> Float[Array, "batch time vocab"]:
        weight = (self.lm_head or self.embed_tokens).weight[...]
        logits = everyone(self.sharding, product(x, weight)) * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def turned(self, layer: int, positions: Int[Array, "batch time"], *x: Array) -> list[Array]:
        """Rotates queries and keys (batch, time, heads, head_dim) of a layer to the positions of their tokens."""
        return [self.config.ropes[layer](part, positions[:, :, None]) for part in x]

    def attention_options(self, layer: int) -> dict[str, Any]:
        """Returns scale, window, soft limit and learned sinks of a layer, as `rqjax.attend` takes them."""
        config, sinks = self.config, self.layers[layer].self_attn.sinks
        return {
            "scale": config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
            "sliding_window": config.windows[layer],
            "softcap": config.attention_softcap,
            "sink_logits": None if sinks is None else sinks[...],
        }

    def caches(
        self,
        name: str | Sequence[Strategy],
        key: Array,
        batch: int,
        max_len: int,
        *,
        boundary: int = 0,
        **options: Any,
    ) -> tuple[KVCache, ...]:
        """Makes empty caches, one for each layer. On a mesh each device has those of its own heads.

        Layers that see only a window of tokens keep these alone, in full precision, where that takes fewer bytes.

        Args:
          name: of the strategy, as in `rqjax.strategy`: each layer has its own random rotation; or a strategy for each
            layer, as of learned quantizers.
          key: random key.
          batch: sequences.
          max_len: tokens that each sequence has room for.
          boundary: how many of the first and of the last layers are in full precision.
          **options: as in `KVCache.init`.
        """
        config, heads = self.config, self.config.num_key_value_heads
        parts = self.strategies(name, key, boundary, options.get("dtype"))
        # Some layer has pages, or there would be no book of them.
        windows = config.windows if options.get("pages") is None or None in config.windows else [None] * len(parts)
        makes = [
            functools.partial(part.cache, batch, heads, max_len, rope=rope, sliding_window=window, **options)
            for part, rope, window in zip(parts, config.ropes, windows, strict=True)
        ]
        return tuple(make() if self.sharding is None else empty(make, self.sharding) for make in makes)

    def strategies(
        self, name: str | Sequence[Strategy], key: Array, boundary: int = 0, dtype: DTypeLike | None = None
    ) -> list[Strategy]:
        """Makes the strategy of each layer; arguments as in `caches`."""
        config = self.config
        layers, edge = config.num_hidden_layers, check_int("boundary", boundary, 0, config.num_hidden_layers)
        exact = jnp.dtype(dtype or (jnp.float32 if name == "float32" else jnp.bfloat16)).name
        names = [name] * layers if isinstance(name, str) else name
        names = [n if edge <= layer < layers - edge else exact for layer, n in enumerate(names)]
        return for_layers(names, key, layers, config.head_dim, config.kv_lora_rank or None)

    def calibrate(self, tokens: Tokens, name: str | Sequence[str], key: Array) -> list[Strategy]:
        """Fits the quantizers of strategies to this decoder's own keys and values, one for each layer.

        Args:
          tokens: text like that which is to come, (n, time).
          name: of the strategy as in `rqjax.strategy`, where recipes of `FITTED` count, too: the quantizers of
            "klt_trellis_2+pre_rope" are fitted to keys before rotary positions; or a name for each layer.
          key: random key.

        Returns:
          Strategies that `caches` takes in the place of a name; `rqjax.save` writes them.

        Raises:
          UnknownName: there is no such strategy or recipe.
          ValueError: there are fewer tokens than dimensions of a head, or keys or values hold NaN.
        """
        return calibrated(self, jnp.asarray(tokens), name, key)

    def cache_nbytes(self, name: str | Sequence[Strategy], batch: int, max_len: int, **options: Any) -> int:
        """Counts the bytes of the caches that `caches` would make, without making them."""
        key = jax.random.key(0)
        return nbytes(jax.eval_shape(lambda: self.caches(name, key, batch, max_len, **options)))
