"""Attention to the codes of a cache by a fused kernel for TPUs: the implementation "mosaic_tpu".

A kernel gives what plain JAX gives, but that weights of values are rounded to 15 bits of the largest of some tokens.
"""

import functools
import importlib
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rqjax.backends import nests
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.core import Quantizer, Refusal, platforms, register
from rqjax.core.dispatch import CONTEXT
from rqjax.quantizers.per_head import PerHead

INTERPRET: ContextVar[Any] = ContextVar("interpret_tpu", default=False)
"""Set to True, or to `jax.experimental.pallas.tpu.InterpretParams()`, to run kernels on a CPU."""
CONTEXT.append(INTERPRET.get)


def refusal_of_device() -> Refusal | None:
    """Why kernels cannot run, if they cannot: they need a TPU and jax 0.10.2."""
    if jax.__version_info__ < (0, 10, 2):
        return Refusal(f"mosaic_tpu kernels need jax 0.10.2 or newer, this is {jax.__version__}")
    if not INTERPRET.get() and platforms.platform() != "tpu":
        return Refusal(f"mosaic_tpu kernels need a TPU, this is {platforms.platform()}")
    return None


@register("mosaic_tpu", "attend", KVCache)
def attender(
    cache: KVCache, q: Array, mask: Array | None, *, sliding_window: int | None, **options: Any
) -> Callable[..., Array] | Refusal:
    """Attention by the kernel for queries (batch, time, q_heads, head_dim)."""
    if refusal := refusal_of_device():
        return refusal
    if reason := _reason(cache, q.shape[1], q.shape[2], mask, sliding_window):
        return Refusal(f"no mosaic_tpu kernel for this attention: {reason}")
    return functools.partial(attention.attend_with, past=past)


def _reason(cache: KVCache, time: int, q_heads: int, mask: Any, sliding_window: Any) -> str | None:
    if reason := nests.reason_of_queries(cache, time, q_heads, mask, sliding_window):
        return reason
    if cache.pre_rope:
        return "codes are of keys before they turn with their positions"
    sides = ("keys", cache.key_quantizer, cache.keys), ("values", cache.value_quantizer, cache.values)
    for name, quantizer, codes in sides:
        if reason := nests.reason_of_leaf(nests.part(quantizer, codes), isinstance(quantizer, PerHead)):
            return f"{name}: {reason}"
    return None


def past(
    cache: KVCache,
    y: Float[Array, "b h r d"],
    position: Int[Array, "batch"],
    sliding_window: int | None,
    softcap: float | int | None,
) -> attention.Sums:
    """The sums over the tokens in codes, by the kernel.

    Args:
      cache: the cache.
      y: scaled queries.
      position: of the queries of each sequence.
      sliding_window, softcap: as in `rqjax.attend`.
    """
    if cache.rope is not None and cache.key_mean is not None:
        shift = cache.rope.inner(y, cache.key_mean, jnp.int32(cache.sinks), cache.capacity)
    else:
        mean = nests.mean_scores(cache, y)
        shift = None if mean is None else mean[..., None]
    largest, total, sums = importlib.import_module("pallas_kernels.tpu.decode_attention").decode_attention(
        nests.by_head(_as_multiplied, cache.key_quantizer, y),
        nests.packed(nests.part(cache.key_quantizer, cache.keys)),
        nests.packed(nests.part(cache.value_quantizer, cache.values)),
        *nests.bounds(cache, position, sliding_window),
        shift,
        tables=cache.tables,
        softcap=softcap,
        interpret=INTERPRET.get(),
    )
    return attention.Sums(largest, total, nests.by_head(_restored, cache.value_quantizer, sums))


def _as_multiplied(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Float[Array, "b h r d"]:
    """Queries as they are multiplied with levels."""
    found = nests.RotatedScalar.of(quantizer)
    return found.rotated(y) * nests.step(found.leaf)


def _restored(quantizer: Quantizer, sums: Float[Array, "b h r d"]) -> Float[Array, "b h r d"]:
    """What sums of levels stand for."""
    found = nests.RotatedScalar.of(quantizer)
    return found.rotated_back(sums * nests.step(found.leaf))
