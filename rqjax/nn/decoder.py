"""A decoder of the Llama, Mistral, Qwen and Gemma families that attends through any cache, compressed or not.

Modules and parameters have the names, and weights the orientation (out, in), of Hugging Face's checkpoints.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rqjax.arrays.planes import never_true
from rqjax.cache.attention import dot_product_attention
from rqjax.cache.kv import KVCache
from rqjax.cache.strategies import Strategy, strategy
from rqjax.core import check_int, nbytes, platforms
from rqjax.nn.compat import jittable, listed
from rqjax.nn.config import DecoderConfig

Attend: TypeAlias = Callable[[int, Array, Array, Array], Array]
"""Attention of layer i: queries, keys and values of the new tokens, (batch, time, heads, head_dim), to outputs."""
Tokens: TypeAlias = Int[Array | np.ndarray, "batch time"]


def product(x: Float[Array, "*n inner"], weight: Float[Array, "outer inner"]) -> Float[Array, "*n outer"]:
    """x W^T in float32.

    On a CPU, XLA makes float32 copies of narrow weights, of all layers before the first is used. A branch is entered
    only when its operands are there, so that there is one copy at a time.
    """

    def multiply(x: Array) -> Array:
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)

    if not platforms.on_cpu() or weight.dtype == jnp.float32:
        return multiply(x)
    nothing = lambda x: jnp.full((*x.shape[:-1], len(weight)), jnp.nan, jnp.float32)  # noqa: E731
    return jax.lax.cond(never_true(x), nothing, multiply, x)


class Linear(nnx.Module):
    """x W^T + b with W (out, in)."""

    def __init__(self, inner: int, outer: int, *, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (outer, inner), dtype))
        self.bias = nnx.Param(jnp.zeros(outer, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*n inner"]) -> Float[Array, "*n outer"]:
        y = product(x, self.weight[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    def __init__(self, count: int, dim: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (count, dim), dtype))

    def __call__(self, tokens: Int[Array, "*n"]) -> Float[Array, "*n dim"]:
        return self.weight[...][tokens]


class RMSNorm(nnx.Module):
    """x / rms(x) times w, in Gemma times 1 + w (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, config: DecoderConfig, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.full(dim, 0 if config.gemma else 1, dtype))
        self.offset, self.eps = 1.0 if config.gemma else 0.0, config.rms_norm_eps

    def __call__(self, x: Float[Array, "*n dim"]) -> Float[Array, "*n dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps)
        return (y * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around an attention function that is given with each call."""

    def __init__(self, config: DecoderConfig, layer: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        dim, size = config.head_dim, config.hidden_size
        outer, kv_outer = config.num_attention_heads * dim, config.num_key_value_heads * dim
        self.q_proj = Linear(size, outer, bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.k_proj = Linear(size, kv_outer, bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.v_proj = Linear(size, kv_outer, bias=config.qkv_bias, rngs=rngs, dtype=dtype)
        self.o_proj = Linear(outer, size, bias=config.out_bias, rngs=rngs, dtype=dtype)
        self.q_norm = RMSNorm(dim, config, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config, dtype) if config.qk_norm else None
        self.layer, self.dim, self.rope = layer, dim, config.ropes[layer]

    def __call__(self, x: Float[Array, "batch time size"], positions: Array, attend: Attend) -> Array:
        heads = (*x.shape[:2], -1, self.dim)
        q, k, v = (project(x).reshape(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, self.rope(q, positions), self.rope(k, positions), v)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """Gated: down(f(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, rngs=rngs, dtype=dtype)
        self.tanh = config.gemma

    def __call__(self, x: Float[Array, "*n size"]) -> Float[Array, "*n size"]:
        gate = self.gate_proj(x)
        return self.down_proj(
            (jax.nn.gelu(gate, approximate=True) if self.tanh else jax.nn.silu(gate)) * self.up_proj(x)
        )


class Block(nnx.Module):
    """Attention and MLP, normalized before, in Gemma also after."""

    def __init__(self, config: DecoderConfig, layer: int, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.self_attn = Attention(config, layer, rngs=rngs, dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)
        self.gemma = config.gemma
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        if config.gemma:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config, dtype)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config, dtype)

    def __call__(self, x: Float[Array, "batch time size"], positions: Array, attend: Attend) -> Array:
        out = self.self_attn(self.input_layernorm(x), positions, attend)
        if self.gemma:
            x = x + self.post_attention_layernorm(out)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x))


@jittable
class Decoder(nnx.Module):
    """Tokens to logits.

    The weights' dtype is that of the computation; norms, rotary angles, attention and logits are of float32.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        """A decoder with random weights; see `rqjax.nn.load_decoder` for those of a checkpoint."""
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, rngs=rngs, dtype=dtype)
        layers = range(config.num_hidden_layers)
        self.layers = listed([Block(config, layer, rngs=rngs, dtype=dtype) for layer in layers])
        self.norm = RMSNorm(config.hidden_size, config, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        tokens: Tokens,
        caches: Sequence[KVCache] | None = None,
        *,
        valid: Int[Array | np.ndarray, "batch"] | None = None,
        newest: int | None = None,
    ) -> tuple[Float[Array, "batch newest vocab"], tuple[KVCache, ...]]:
        """Logits of the token after each, and the caches with the new tokens.

        Args:
          tokens: (batch, time), after those that the caches hold.
          caches: one for each layer, of `caches`; without them attention is exact, over these tokens alone.
          valid: how many tokens of each sequence count, the last ones (padding is on the left); needs caches.
          newest: of how many of the last tokens logits are made; of all, if not given.
        """
        tokens = jnp.asarray(tokens)
        batch, time = tokens.shape
        kept: list[KVCache] = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            options = self.attention_options(layer)
            if caches is None:
                return exact_attention(q, k, v, **options)
            out, cache = dot_product_attention(q, k, v, caches[layer], valid=valid, **options)
            kept.append(cache)
            return out

        if caches is None:
            if valid is not None:
                raise ValueError("valid needs caches")
            before = jnp.zeros((batch, 1), jnp.int32)
        elif len(caches) != self.config.num_hidden_layers:
            raise ValueError(f"expected {self.config.num_hidden_layers} caches, one a layer, got {len(caches)}")
        else:
            before = (caches[0].lengths - (0 if valid is None else time - jnp.asarray(valid)))[:, None]
        x = self.hidden(tokens, before + jnp.arange(time), attend)
        return self.logits(x if newest is None else x[:, time - newest :]), tuple(kept)

    def hidden(
        self, tokens: Tokens, positions: Int[Array, "batch time"], attend: Attend
    ) -> Float[Array, "batch time size"]:
        """The last layer's output, normalized; with any attention."""
        x = self.embed_tokens(jnp.asarray(tokens))
        if self.config.gemma:
            x = x * jnp.asarray(math.sqrt(self.config.hidden_size), x.dtype)
        for block in self.layers:
            x = block(x, positions, attend)
        return self.norm(x)

    def logits(self, x: Float[Array, "batch time size"]) -> Float[Array, "batch time vocab"]:
        weight = (self.lm_head or self.embed_tokens).weight[...]
        logits = product(x, weight)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def attention_options(self, layer: int) -> dict[str, Any]:
        """Scale, window and soft limit of a layer, as `rqjax.attend` takes them."""
        config = self.config
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        return {"scale": scale, "sliding_window": config.windows[layer], "softcap": config.attention_softcap}

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
        """Empty caches, one for each layer.

        Args:
          name: of the strategy, as in `rqjax.strategy`: each layer has its own random rotation; or a strategy for each
            layer, as of learned quantizers.
          key: random key.
          batch: sequences.
          max_len: tokens that each sequence has room for.
          boundary: how many of the first and of the last layers are in full precision.
          **options: as in `KVCache.init`.
        """
        config = self.config
        layers, edge = config.num_hidden_layers, check_int("boundary", boundary, 0, config.num_hidden_layers)
        dtype = jnp.dtype(options.get("dtype", jnp.float32 if name == "float32" else jnp.bfloat16)).name
        if not isinstance(name, str) and len(name) != layers:
            raise ValueError(f"expected {layers} strategies, one a layer, got {len(name)}")
        names = [name] * layers if isinstance(name, str) else name
        names = [n if edge <= layer < layers - edge else dtype for layer, n in enumerate(names)]
        parts = [
            strategy(n, jax.random.fold_in(key, i), config.head_dim) if isinstance(n, str) else n
            for i, n in enumerate(names)
        ]
        return tuple(part.cache(batch, config.num_key_value_heads, max_len, **options) for part in parts)

    def cache_nbytes(self, name: str | Sequence[Strategy], batch: int, max_len: int, **options: Any) -> int:
        """Bytes of the caches that `caches` would make, of which none is made."""
        key = jax.random.key(0)
        return nbytes(jax.eval_shape(lambda: self.caches(name, key, batch, max_len, **options)))


def exact_attention(
    q: Float[Array, "batch time q_heads dim"],
    k: Float[Array, "batch time heads dim"],
    v: Float[Array, "batch time heads dim"],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "batch time q_heads dim"]:
    """Causal attention of tokens to one another, without a cache; options as in `rqjax.attend`.

    Blocks of queries meet only the keys that they see, and their weights are made anew for the gradient.
    """
    time, reach = q.shape[1], sliding_window or q.shape[1]

    @functools.partial(jax.checkpoint, static_argnums=(3, 4))
    def block(q: Array, k: Array, v: Array, start: int, first: int) -> Array:
        y = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scores = scale * jnp.einsum("bthgd,bshd->bhgts", y, k, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        age = start + jnp.arange(q.shape[1])[:, None] - first - jnp.arange(k.shape[1])
        weights = jax.nn.softmax(jnp.where((age >= 0) & (age < reach), scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhgts,bshd->bthgd", weights.astype(v.dtype), v).reshape(q.shape)

    size = max(128, -(-time // 16))
    parts = []
    for start in range(0, time, size):
        first, end = max(0, start - reach + 1), start + size
        parts.append(block(q[:, start:end], k[:, first:end], v[:, first:end], start, first))
    return jnp.concatenate(parts, axis=1)
