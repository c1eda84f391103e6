"""MLX's fused kernels on Apple GPUs, as jax-mps offers them: the implementation "mps".

Affine groups are stored bit for bit in MLX's layout, so that one kernel multiplies codes with queries or weights and
never unpacks them. All other codes stand for levels in int8, which are looked up, a byte each. An 8-bit grid of step 1
represents them exactly, and the same kernel multiplies by them. jax-metal has no such kernels.
"""

import functools
import importlib
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.backends.finders import Entry, of_vectors, register
from rqjax.backends.nests import within_rotations
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.core import Codes, Quantizer, nest, platforms
from rqjax.core.quantizer import roundtrip
from rqjax.quantizers.affine import MLX_BITS, MLX_GROUPS, Affine, MinMax
from rqjax.quantizers.combinators import Rotated
from rqjax.scoring.integers import float_products
from rqjax.search.find import search, search_with
from rqjax.search.index import Index

OFFSET = 128
"""Difference between an index of 8 bits and its level."""


def _missing() -> str | None:
    """Returns why kernels cannot run, or None: they are those of jax-mps."""
    if platforms.platform() != "mps":
        return f"mps kernels need jax-mps on an Apple GPU, this is {platforms.platform()}"
    try:
        _operations()
    except ImportError:
        return "this jax-mps has no jax_plugins.mps.ops"
    return None


def _operations() -> Any:
    """Imports the module of jax-mps with the kernels, which are MLX's."""
    return importlib.import_module("jax_plugins.mps.ops")


def _limits(quantizer: Quantizer, *_: Any, **__: Any) -> str | None:
    """Returns why there are no kernels for a quantizer, or None for an `Affine` that MLX takes, alone or within
    rotations."""
    inner = within_rotations(quantizer)
    if isinstance(inner, Affine) and inner.bits in MLX_BITS and inner.group_size in MLX_GROUPS:
        return None
    return (
        f"mps kernels are for Affine of {MLX_BITS} bits and groups of {MLX_GROUPS}, alone or rotated, "
        f"not for {nest(quantizer)}"
    )


def _limits_to_encode(quantizer: Quantizer, x: Any) -> str | None:
    """Returns the limits of `_limits`, and that MLX has no grid from the least to the largest number."""
    return (
        "mps kernels encode Affine, not MinMax"
        if isinstance(within_rotations(quantizer), MinMax)
        else _limits(quantizer)
    )


def _limits_of_levels(y: Any, levels: Any) -> str | None:
    n = levels.shape[-1]
    return None if _group(n) else f"mps kernels take levels by groups of {MLX_GROUPS}, not {n} of them"


def _limits_of_attention(cache: KVCache, *_: Any, **__: Any) -> str | None:
    """Returns why kernels do not take all of attention's products, or None."""
    if cache.weighs_keys:
        return "no mps kernel for this attention: values depend on the codes of the keys"
    for name, quantizer in (("keys", cache.key_quantizer), ("values", cache.value_quantizer)):
        if not quantizer.in_integers:
            return f"no mps kernel for this attention: {name}: no levels in int8 in {nest(quantizer)}"
    return None


def _limits_of_search(index: Index, *_: Any, **__: Any) -> str | None:
    """Returns why kernels do not take all products of a search, or None."""
    if index.quantizer.in_integers:
        return None
    return f"no mps kernel for this search: no levels in int8 in {nest(index.quantizer)}"


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
    """Multiplies y with the decoded vectors (*b, t, d), or with their transposes, of codes in MLX's layout."""
    options = {"transpose": transpose, "group_size": quantizer.group_size, "bits": quantizer.bits}
    return _operations().quantized_matmul(y, *_wide(codes), **options)


def _scores(quantizer: Affine, y: Float[Array, "*b r n"], codes: Codes) -> Array:
    return _products(quantizer, y, codes, transpose=True)  # in MLX's layout keys lie as values do


def _group(n: int) -> int | None:
    """The largest of MLX's groups that divides n."""
    return next((size for size in MLX_GROUPS[::-1] if n % size == 0), None)


def _level_products(y: Float[Array, "*b r n"], levels: Int8[Array, "*b m n"]) -> Float[Array, "*b r m"]:
    group = _group(levels.shape[-1])
    assert group is not None
    indices = lax.bitcast_convert_type(levels, jnp.uint8) ^ OFFSET
    words = lax.bitcast_convert_type(indices.reshape(*indices.shape[:-1], -1, 4), jnp.uint32)
    step = jnp.ones((*levels.shape[:-1], levels.shape[-1] // group))
    return _operations().quantized_matmul(y, words, step, -OFFSET * step, transpose=True, group_size=group, bits=8)


def _attend(*arguments: Any, **options: Any) -> Array:
    return attention.attend_with(*arguments, weigh_exact=_exact_attention, **options)


def _exact_attention(
    y: Float[Array, "b h r d"], k: Shaped[Array, "b h t d"], v: Shaped[Array, "b h t d"], seen: Bool[Array, "..."]
) -> Float[Array, "b h r d"]:
    """Softmax attention of scaled queries to the tokens that each sees, at least one."""
    return _operations().sdpa(y, as_float32(k), as_float32(v), scale=1.0, mask=seen)


def _wide(codes: Codes) -> Codes:
    return codes[0], *map(as_float32, codes[1:])


register(
    "mps",
    _missing,
    [
        Entry(Quantizer.encode, (Affine, Rotated), of_vectors(_limits_to_encode), _encode),
        Entry(Quantizer.decode, (Affine, Rotated), _limits, _decode),
        Entry(roundtrip, (Affine, Rotated), of_vectors(_limits_to_encode), _roundtrip),
        Entry(Quantizer.scores, (Affine,), _limits, _scores),
        Entry(Quantizer.weigh, (Affine,), _limits, functools.partial(_products, transpose=False)),
        Entry(float_products, (object,), _limits_of_levels, _level_products),
        Entry(attention.attend, (KVCache,), _limits_of_attention, _attend, rows=False),
        Entry(search, (Index,), _limits_of_search, search_with, rows=False),
    ],
)
