"""Multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434): a cache of one vector a token for all heads.

Keys and values of all heads are linear in a latent of the token. Beside it, coordinates that turn with the positions
are a key of their own, the same for all heads. The maps from latents to keys and values are multiplied into queries and
outputs. All heads then attend to one head: its key is these coordinates and the latent, its value is the latent.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rqjax.nn.config import DecoderConfig
from rqjax.nn.layers import Linear, RMSNorm, product

EPS = 1e-6
"""Epsilon of norms within attention, whatever `rms_norm_eps` says."""


class LatentAttention(nnx.Module):
    """Projections around an attention function that is given with each call."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        size, rank, inner = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
        self.heads, self.fixed = config.num_attention_heads, config.qk_nope_head_dim
        self.turning, self.inner, self.sinks = config.head_dim - rank, inner, None
        options = {"rngs": rngs, "dtype": dtype}
        of_queries = self.heads * (self.turning + self.fixed)
        if inner:
            self.q_a_proj = Linear(size, inner, bias=config.qkv_bias, **options)
            self.q_a_layernorm = RMSNorm(inner, config, dtype, EPS)
            self.q_b_proj = Linear(inner, of_queries, **options)
        else:
            self.q_proj = Linear(size, of_queries, **options)
        self.kv_a_proj_with_mqa = Linear(size, config.head_dim, bias=config.qkv_bias, **options)
        self.kv_a_layernorm = RMSNorm(rank, config, dtype, EPS)
        self.kv_b_proj = Linear(rank, self.heads * (self.fixed + config.v_head_dim), **options)
        self.o_proj = Linear(self.heads * config.v_head_dim, size, bias=config.out_bias, **options)

    @property
    def to_cache(self) -> tuple[Linear, ...]:
        """Projections that make what a cache holds."""
        return (self.kv_a_proj_with_mqa,)

    def __call__(
        self, x: Float[Array, "batch time size"], attend: Callable[[Array, Array, Array], Array]
    ) -> Float[Array, "batch time size"]:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.inner else self.q_proj(x)
        turning, fixed = jnp.split(q.reshape(*x.shape[:2], self.heads, -1), [self.turning], axis=-1)
        weight = self.kv_b_proj.weight[...]
        to_keys, to_values = jnp.split(weight.reshape(self.heads, -1, weight.shape[1]), [self.fixed], axis=1)
        q = jnp.concatenate([turning, product(fixed, to_keys, "bthi,hio->btho").astype(x.dtype)], axis=-1)
        turning, latent = jnp.split(self.kv_a_proj_with_mqa(x), [self.turning], axis=-1)
        v = self.kv_a_layernorm(latent)[:, :, None]
        out = attend(q, jnp.concatenate([turning[:, :, None], v], axis=-1), v)
        out = product(out, to_values, "bthi,hoi->btho").astype(x.dtype)
        return self.o_proj(out.reshape(*x.shape[:2], -1))
