"""Attention: exact, without a cache, and with a compressed one as an nnx module."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from rqjax.cache.attention import dot_product_attention
from rqjax.cache.kv import KVCache, Tokens
from rqjax.core.products import full_precision
from rqjax.nn import compat


class CachedAttention(nnx.Module):
    """Causal attention of new tokens to all tokens so far, which it keeps compressed.

    It is called as `flax.nnx.dot_product_attention` is and goes where an `attention_fn` does: with
    `nnx.MultiHeadAttention(..., attention_fn=CachedAttention(cache), decode=False)` each call appends the new tokens
    and attends. The cache is an `nnx.Cache` variable, so `nnx.jit` updates it.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> from rqjax.nn import CachedAttention
      >>> cache = rqjax.strategy("eden_4", jax.random.key(0), dim=64).cache(1, 2, 256)
      >>> q, k, v = (jnp.ones((1, 3, heads, 64)) for heads in (8, 2, 2))
      >>> CachedAttention(cache)(q, k, v).shape
      (1, 3, 8, 64)
    """

    def __init__(self, cache: KVCache, **options: Any):
        """A module around `cache`; `options` as in `rqjax.attend`."""
        self.cache = nnx.Cache(cache)
        self.attention = functools.partial(dot_product_attention, **options)

    def __call__(
        self,
        query: Tokens,
        key: Tokens,
        value: Tokens,
        bias: None = None,
        mask: Array | None = None,
        *,
        dropout_rate: float | int = 0.0,
        deterministic: bool = True,
        **unused: Any,
    ) -> Shaped[Array, "batch time heads dim"]:
        """Appends key and value, attends with query; all (batch, time, heads, head_dim).

        Args:
          mask: as in `rqjax.attend`; attention is causal without it.

        Raises:
          ValueError: a bias or dropout is asked for.
        """
        if bias is not None or (dropout_rate > 0 and not deterministic):
            raise ValueError("CachedAttention has neither bias nor dropout: set dropout_rate=0 or deterministic=True")
        out, cache = self.attention(query, key, value, compat.value(self.cache), mask=mask)
        compat.set_value(self.cache, cache)
        return out


class Decoded(NamedTuple):
    """Keys and values as a cache decodes them, which stand for those of tokens that it holds as codes."""

    keys: Float[Array, "batch time heads dim"]
    values: Float[Array, "batch time heads value_dim"]
    window: int
    """Newest tokens that a query sees in full precision, itself among them."""
    sinks: int
    """First tokens in full precision."""


def exact_attention(
    q: Float[Array, "batch time q_heads dim"],
    k: Float[Array, "batch time heads dim"],
    v: Float[Array, "batch time heads value_dim"],
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sink_logits: Float[Array, "q_heads"] | None = None,
    decoded: Decoded | None = None,
) -> Float[Array, "batch time q_heads value_dim"]:
    """Causal attention of tokens to one another, without a cache; options as in `rqjax.attend`.

    A block of queries meets only the keys that it sees. Its weights are computed again for the gradient. With `decoded`
    tokens outside of a query's window are seen as a cache decodes them.

    Example:
      >>> import jax.numpy as jnp
      >>> from rqjax.nn import exact_attention
      >>> q, k, v = (jnp.ones((1, 3, heads, 64)) for heads in (8, 2, 2))
      >>> exact_attention(q, k, v, scale=0.125).shape
      (1, 3, 8, 64)
    """
    time, reach = q.shape[1], sliding_window or q.shape[1]

    @functools.partial(jax.checkpoint, static_argnums=(3, 4))
    def block(q: Array, keys: list[Array], values: list[Array], start: int, first: int) -> Array:
        y = q.reshape(*q.shape[:2], keys[0].shape[2], -1, q.shape[3])
        token = first + jnp.arange(keys[0].shape[1])
        age = start + jnp.arange(q.shape[1])[:, None] - token
        einsum = functools.partial(jnp.einsum, precision=full_precision(y, keys[0], values[0]))
        product = functools.partial(einsum, "bthgd,bshd->bhgts", y, preferred_element_type=jnp.float32)
        scores, in_codes = product(keys[0]), False
        if decoded is not None:
            in_codes = (age >= decoded.window) & (token >= decoded.sinks)
            scores = jnp.where(in_codes, product(keys[1]), scores)
        scores = scale * scores
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where((age >= 0) & (age < reach), scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        if sink_logits is not None:  # tokens keep total / (total + exp(sink)) of the weights
            sinks = sink_logits.astype(jnp.float32).reshape(y.shape[2], -1, 1)
            weights *= jax.nn.sigmoid(jax.nn.logsumexp(scores, axis=-1) - sinks)[..., None]
        parts = [weights] if decoded is None else [jnp.where(in_codes, 0, weights), jnp.where(in_codes, weights, 0)]
        summed = functools.partial(einsum, "bhgts,bshd->bthgd")
        out = functools.reduce(operator.add, [summed(w.astype(v.dtype), v) for w, v in zip(parts, values, strict=True)])
        return out.reshape(*q.shape[:3], -1)

    keys, values = [k], [v]
    if decoded is not None:
        keys, values = [k, decoded.keys], [v, decoded.values]
    size = max(128, -(-time // 16))
    parts = []
    for start in range(0, time, size):
        first, end = max(0, start - reach + 1), start + size
        seen = ([x[:, first:end] for x in side] for side in (keys, values))
        parts.append(block(q[:, start:end], *seen, start, first))
    return jnp.concatenate(parts, axis=1)
