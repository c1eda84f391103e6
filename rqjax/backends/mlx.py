"""MLX's fused kernels on Apple GPUs, as jax-mps offers them: the implementation "mps".

Affine groups are stored bit for bit in MLX's layout, so that codes meet queries and weights in one kernel and are never
unpacked. All other codes stand for levels in int8; those are looked up, a byte each, and an 8-bit grid of step 1 holds
them as they are: the same kernel multiplies by them, exactly. jax-metal has no such kernels.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.core import Codes, Quantizer, Refusal, nest, platforms, register
from rqjax.quantizers.affine import MLX_BITS, MLX_GROUPS, Affine
from rqjax.quantizers.combinators import Rotated
from rqjax.search.index import Index, search_with

OFFSET = 128
"""What an index of 8 bits is above its level."""


def refusal_of_device() -> Refusal | None:
    """Why kernels cannot run, if they cannot: they are those of jax-mps."""
    if platforms.platform() != "mps":
        return Refusal(f"mps kernels need jax-mps on an Apple GPU, this is {platforms.platform()}")
    try:
        _operations()
    except ImportError:
        return Refusal("this jax-mps has no jax_plugins.mps.ops")
    return None


def _operations() -> Any:
    """The module of jax-mps with the kernels, which are those of MLX."""
    return importlib.import_module("jax_plugins.mps.ops")


def _refusal(quantizer: Quantizer) -> Refusal | None:
    """Why there are no kernels for other than an `Affine` that MLX takes, alone or within rotations."""
    inner = quantizer
    while isinstance(inner, Rotated):
        inner = inner.inner
    if isinstance(inner, Affine) and inner.bits in MLX_BITS and inner.group_size in MLX_GROUPS:
        return refusal_of_device()
    return Refusal(
        f"mps kernels are for Affine of {MLX_BITS} bits and groups of {MLX_GROUPS}, alone or rotated, "
        f"not for {nest(quantizer)}"
    )


@register("mps", "float_products", object, rows=True)
def multiplier(y: Float[Array, "b h r n"], levels: Int8[Array, "b h m n"]) -> Callable[..., Array] | Refusal:
    """The kernel (numbers, levels) -> inner products."""
    group = next((size for size in MLX_GROUPS[::-1] if levels.shape[-1] % size == 0), None)
    if group is None:
        return Refusal(f"mps kernels take levels by groups of {MLX_GROUPS}, not {levels.shape[-1]} of them")
    return refusal_of_device() or functools.partial(_level_products, group)


@register("mps", "attend", KVCache)
def attender(cache: KVCache, *arguments: Any, **options: Any) -> Callable[..., Array] | Refusal:
    """Attention whose products are all taken by kernels."""
    if refusal := refusal_of_device():
        return refusal
    if cache.values_in_keys:
        return Refusal("no mps kernel for this attention: values are a part of the keys")
    for name, quantizer in (("keys", cache.key_quantizer), ("values", cache.value_quantizer)):
        if not quantizer.in_integers:
            return Refusal(f"no mps kernel for this attention: {name}: no levels in int8 in {nest(quantizer)}")
    return functools.partial(attention.attend_with, weigh_exact=_attention)


@register("mps", "search", Index)
def searcher(index: Index, *arguments: Any, **options: Any) -> Callable[..., Any] | Refusal:
    """A search whose products are all taken by kernels."""
    if refusal := refusal_of_device():
        return refusal
    if not index.quantizer.in_integers:
        return Refusal(f"no mps kernel for this search: no levels in int8 in {nest(index.quantizer)}")
    return search_with


def _encode(quantizer: Any, x: Array) -> Codes:
    if isinstance(quantizer, Rotated):
        return _encode(quantizer.inner, quantizer.rotation(x))
    words, *grid = _operations().quantize(as_float32(x), group_size=quantizer.group_size, bits=quantizer.bits)
    return words, *(part.astype(quantizer.dtype) for part in grid)


def _decode(quantizer: Any, codes: Codes, *, dtype: DTypeLike | None = None) -> Array:
    if isinstance(quantizer, Rotated):
        x = quantizer.rotation.inverse(_decode(quantizer.inner, codes))
    else:
        x = _operations().dequantize(*_wide(codes), group_size=quantizer.group_size, bits=quantizer.bits)
    return x.astype(dtype or jnp.float32)


def _roundtrip(quantizer: Any, x: Array) -> Array:
    return _decode(quantizer, _encode(quantizer, x), dtype=x.dtype)


def _products(quantizer: Affine, y: Float[Array, "*b r n"], codes: Codes, *, transpose: bool) -> Array:
    """y times the decoded vectors (*b, t, d), or times their transposes, of codes in MLX's layout."""
    options = {"transpose": transpose, "group_size": quantizer.group_size, "bits": quantizer.bits}
    return _operations().quantized_matmul(y, *_wide(codes), **options)


def _scores(quantizer: Affine, y: Float[Array, "*b r n"], codes: Codes) -> Array:
    return _products(quantizer, y, codes, transpose=True)  # in MLX's layout keys lie as values do


def _level_products(group: int, y: Float[Array, "*b r n"], levels: Int8[Array, "*b m n"]) -> Float[Array, "*b r m"]:
    indices = lax.bitcast_convert_type(levels, jnp.uint8) ^ OFFSET
    words = lax.bitcast_convert_type(indices.reshape(*indices.shape[:-1], -1, 4), jnp.uint32)
    step = jnp.ones((*levels.shape[:-1], levels.shape[-1] // group))
    return _operations().quantized_matmul(y, words, step, -OFFSET * step, transpose=True, group_size=group, bits=8)


def _attention(
    y: Float[Array, "b h r d"], k: Shaped[Array, "b h t d"], v: Shaped[Array, "b h t d"], seen: Bool[Array, "..."]
) -> Float[Array, "b h r d"]:
    """Softmax attention of scaled queries to the tokens that they see; at least one each."""
    return _operations().sdpa(y, as_float32(k), as_float32(v), scale=1.0, mask=seen)


def _wide(codes: Codes) -> Codes:
    return codes[0], *map(as_float32, codes[1:])


def _found(run: Callable[..., Any]) -> Callable[..., Any]:
    """What finds `run` for the quantizers that it is for."""
    return lambda quantizer, *arguments, **options: _refusal(quantizer) or run


for _operation, _run in {"encode": _encode, "decode": _decode, "roundtrip": _roundtrip}.items():
    register("mps", _operation, Affine, Rotated, rows=True)(_found(_run))
register("mps", "prepare", Affine, rows=True)(_found(lambda quantizer, y: y))
register("mps", "scores", Affine, rows=True)(_found(_scores))
register("mps", "weigh", Affine, rows=True)(_found(functools.partial(_products, transpose=False)))
