"""Attention with a compressed cache as an nnx module."""

import functools
from typing import Any

from flax import nnx
from jaxtyping import Array, Shaped

from rqjax.cache.attention import dot_product_attention
from rqjax.cache.kv import KVCache, Tokens
from rqjax.nn import compat


class CachedAttention(nnx.Module):
    """Causal attention of new tokens to all tokens so far, which it keeps compressed.

    It is called as `flax.nnx.dot_product_attention` is and goes where an `attention_fn` does: with
    `nnx.MultiHeadAttention(..., attention_fn=CachedAttention(cache), decode=False)` each call appends the new tokens
    and attends. The cache is an `nnx.Cache` variable, so `nnx.jit` updates it.
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
