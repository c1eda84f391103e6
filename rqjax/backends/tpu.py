"""Which quantizers and caches have a fused kernel for TPUs: the implementation "mosaic_tpu".

A kernel gives what plain JAX gives, up to values within rounding of a boundary between two levels; in attention
queries, and weights of some tokens, are rounded to 15 bits of the largest.
"""

import functools
import importlib
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from rqjax.arrays import norms
from rqjax.backends import nests
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.cache.queries import Queries
from rqjax.cache.sums import Sums
from rqjax.core import Codes, Quantizer, Refusal, nest, platforms, register
from rqjax.core.dispatch import CONTEXT
from rqjax.quantizers.combinators import Normalized, Scaled
from rqjax.quantizers.per_head import PerHead
from rqjax.quantizers.scalar import Scalar

INTERPRET: ContextVar[Any] = ContextVar("interpret_tpu", default=False)
"""Set to True, or to `jax.experimental.pallas.tpu.InterpretParams()`, to run kernels on a CPU."""
CONTEXT.append(INTERPRET.get)


def refusal_of_device() -> Refusal | None:
    """Why kernels cannot run, if they cannot: they need a TPU and jax 0.10.2."""
    if jax.__version_info__ < (0, 10, 2):
        return Refusal(f"mosaic_tpu kernels need jax 0.10.2 or newer, this is {jax.__version__}")
    if INTERPRET.get():
        return None
    if platforms.platform() != "tpu":
        return Refusal(f"mosaic_tpu kernels need a TPU, this is {platforms.platform()}")
    kind = jax.devices()[0].device_kind
    if not kind.startswith(("TPU v5", "TPU v6")):
        return Refusal(f"mosaic_tpu kernels need a TPU that multiplies int8, v5 or v6, this is {kind}")
    return None


def _kernel(module: str) -> Any:
    """A module of `pallas_kernels.tpu`, imported when it is used."""
    return importlib.import_module(f"pallas_kernels.tpu.{module}")


def _refusal(quantizer: Quantizer, shape: tuple[int, ...], dtype: DTypeLike) -> Refusal | None:
    """Why no kernel encodes or decodes vectors of a shape and dtype, if none does."""
    if refusal := refusal_of_device():
        return refusal
    found, vectors = nests.RotatedScalar.of(quantizer), _kernel("vectors")
    leaf = found.leaf
    if not (isinstance(leaf, Scalar) and found.rotations and isinstance(found.outer, Normalized | Scaled)):
        return Refusal(
            f"mosaic_tpu kernels are for Normalized or Scaled(Rotated(rotation, Scalar)), not for {nest(quantizer)}"
        )
    if not leaf.symmetric or leaf.bits > vectors.MAX_BITS:
        which = f"{leaf.bits} bits" if leaf.symmetric else "others"
        return Refusal(f"mosaic_tpu kernels are for symmetric levels of up to {vectors.MAX_BITS} bits, not for {which}")
    if found.outer.dtype == norms.LOGARITHMIC:
        return Refusal("mosaic_tpu kernels are for norms in floating point, not in eight bits")
    if jnp.dtype(dtype).name not in vectors.DTYPES:
        return Refusal(f"mosaic_tpu kernels take {', '.join(vectors.DTYPES)}, not {jnp.dtype(dtype)}")
    if shape[-1] not in vectors.DIMS or leaf.dim != shape[-1]:
        return Refusal(f"mosaic_tpu kernels take vectors of dimension {vectors.DIMS}, not {shape[-1]}")
    return None if math.prod(shape) else Refusal("mosaic_tpu kernels take at least one vector")


@register("mosaic_tpu", "encode", Normalized, Scaled, rows=True)
def encoder(quantizer: Quantizer, x: Shaped[Array, "*n d"]) -> Callable[[Any, Any], Codes] | Refusal:
    """The kernel (quantizer, vectors) -> codes."""
    return _refusal(quantizer, x.shape, x.dtype) or _encode


@register("mosaic_tpu", "decode", Normalized, Scaled, rows=True)
def decoder(quantizer: Quantizer, codes: Codes, *, dtype: DTypeLike | None = None) -> Callable[..., Array] | Refusal:
    """The kernel (quantizer, codes) -> vectors."""
    return _refusal(quantizer, (*codes[0].shape, quantizer.dim), dtype or "float32") or _decode


@register("mosaic_tpu", "roundtrip", Normalized, Scaled, rows=True)
def roundtripper(quantizer: Quantizer, x: Shaped[Array, "*n d"]) -> Callable[[Any, Any], Array] | Refusal:
    """The kernel (quantizer, vectors) -> decoded vectors."""
    return _refusal(quantizer, x.shape, x.dtype) or _roundtrip


def _parts(quantizer: Any) -> tuple[Array, Array, Any]:
    """The matrix of the rotation, the levels, and what is static, as the kernels take them."""
    found = nests.RotatedScalar.of(quantizer)
    plan = _kernel("vectors").Plan(found.leaf.bits, getattr(quantizer, "mode", None), quantizer.dtype)
    return found.rotated(jnp.eye(quantizer.dim)).T, found.leaf.values, plan


def _encode(quantizer: Any, x: Array) -> Codes:
    rows = x.reshape(-1, x.shape[-1])
    norm, words = _kernel("vectors").encode(rows, *_parts(quantizer), interpret=INTERPRET.get())
    return norm.reshape(x.shape[:-1]), words.reshape(*x.shape[:-1], -1)


def _decode(quantizer: Any, codes: Codes, *, dtype: DTypeLike | None = None) -> Array:
    norm, words = codes
    flat = norm.reshape(-1), words.reshape(norm.size, -1)
    options = {"dtype": dtype or jnp.float32, "interpret": INTERPRET.get()}
    return _kernel("vectors").decode(*flat, *_parts(quantizer), **options).reshape(*norm.shape, -1)


def _roundtrip(quantizer: Any, x: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    return _kernel("vectors").roundtrip(rows, *_parts(quantizer), interpret=INTERPRET.get()).reshape(x.shape)


@register("mosaic_tpu", "attend", KVCache)
def attender(
    cache: KVCache, q: Array, mask: Array | None, *, sliding_window: int | None, softcap: Any, **options: Any
) -> Callable[..., Array] | Refusal:
    """Attention by the kernel for queries (batch, time, q_heads, head_dim)."""
    if refusal := refusal_of_device():
        return refusal
    if reason := _reason(cache, q.shape[1], q.shape[2], mask, sliding_window, softcap):
        return Refusal(f"no mosaic_tpu kernel for this attention: {reason}")
    return functools.partial(attention.attend_with, kernel=past)


def _reason(cache: KVCache, time: int, q_heads: int, mask: Any, *options: Any) -> str | None:
    if reason := nests.reason_of_queries(cache, time, q_heads, mask, *options):
        return reason
    sides = ("keys", cache.key_quantizer, cache.keys), ("values", cache.value_quantizer, cache.values)
    for name, quantizer, codes in sides:
        if reason := nests.reason_of_leaf(nests.part(quantizer, codes), isinstance(quantizer, PerHead)):
            return f"{name}: {reason}"
    return None


def past(cache: KVCache, queries: Queries) -> Sums:
    """The sums over the tokens in codes, by the kernel."""
    largest, total, sums = _kernel("decode_attention").decode_attention(
        nests.by_head(_as_multiplied, cache.key_quantizer, queries.y),
        nests.packed(nests.part(cache.key_quantizer, cache.keys)),
        nests.packed(nests.part(cache.value_quantizer, cache.values)),
        *nests.bounds(cache, queries),
        cache.key_form.bias(queries.y, jnp.int32(cache.sinks), cache.capacity),
        tables=cache.tables,
        softcap=queries.softcap,
        interpret=INTERPRET.get(),
    )
    return Sums(largest, total, nests.by_head(_restored, cache.value_quantizer, sums))


def _as_multiplied(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Float[Array, "b h r d"]:
    """Queries as they are multiplied with levels."""
    found = nests.RotatedScalar.of(quantizer)
    return found.rotated(y) * nests.step(found.leaf)


def _restored(quantizer: Quantizer, sums: Float[Array, "b h r d"]) -> Float[Array, "b h r d"]:
    """What sums of levels stand for."""
    found = nests.RotatedScalar.of(quantizer)
    return found.rotated_back(sums * nests.step(found.leaf))
