"""Attention to the codes of a cache by a fused kernel: whether there is one, and its call."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.backends import hopper
from rqjax.backends.hopper import RotatedScalar
from rqjax.backends.hopper_stages import kernel
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.codebooks.trellis_tables import Companded
from rqjax.core import Codes, Quantizer, Refusal, register
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis
from rqjax.scoring import rules
from rqjax.scoring.tiles import TokenArray

DIMS, MAX_ROWS, MAX_BITS, GROUP_MULTIPLE = (64, 128, 256), 16, 4, 64
"""Head dimensions, queries of a key-value head, bits, and what group sizes are multiples of, that the kernel takes."""
MAX_SUMS = 32
"""Groups times queries: a kernel would run out of registers."""


@register("mosaic_gpu", "attend", KVCache)
def attender(
    cache: KVCache, q: Array, mask: Array | None, *, sliding_window: int | None, **options: Any
) -> Callable[..., Array] | Refusal:
    """Attention by the kernel for queries (batch, time, q_heads, head_dim)."""
    if refusal := hopper.refusal_of_device():
        return refusal
    _, time, q_heads, _ = q.shape
    if reason := _reason(cache, time, q_heads, mask, sliding_window):
        return Refusal(f"no mosaic_gpu kernel for this attention: {reason}")
    return functools.partial(attention.attend_with, past=past)


def _reason(cache: KVCache, time: int, q_heads: int, mask: Any, sliding_window: Any) -> str | None:
    _, kv_heads, _, dim = cache.exact_keys.shape
    rows = q_heads // kv_heads * time
    if cache.capacity == 0:
        return "the cache has room for no codes (capacity 0)"
    if dim not in DIMS:
        return f"head_dim is {dim}, not one of {DIMS}"
    if rows > MAX_ROWS:
        return f"{rows} queries share a head of keys and values, more than {MAX_ROWS}"
    if mask is not None:
        return "there is a mask"
    if cache.pre_rope or (cache.rope is not None and cache.key_mean is not None):
        return "keys turn with their positions"
    if time > 1 and (sliding_window is not None or time > cache.window + 1):
        return f"the {time} queries of a sequence do not all see the same codes"
    sides = ("keys", cache.key_quantizer, cache.keys), ("values", cache.value_quantizer, cache.values)
    for name, quantizer, codes in sides:
        if reason := _unsupported_codes(quantizer, codes, dim, rows):
            return f"{name}: {reason}"
    return None


def _unsupported_codes(quantizer: Quantizer, codes: Codes, dim: int, rows: int) -> str | None:
    found = RotatedScalar.of(quantizer, codes)
    leaf, norms = found.leaf, found.norms
    if not isinstance(leaf, Scalar | Trellis | Affine) or (isinstance(leaf, Affine) and norms):
        return "the nest is not rotations and a norm around one Scalar or Trellis, nor rotations around an Affine"
    if leaf.bits > MAX_BITS:
        return f"{leaf.bits} bits, more than {MAX_BITS}"
    if not isinstance(leaf, Affine):
        if norms is None:
            return f"a {type(leaf).__name__} without a norm"
        if isinstance(leaf, Trellis) and not leaf.companded:
            return "the levels of the Trellis are in a table"
        if isinstance(leaf, Scalar) and not (rules.in_integers(leaf) and leaf.symmetric):
            return "the levels of the Scalar are not in int8, or not marked as symmetric"
        dtype = norms.dtype
    else:
        if leaf.group_size % GROUP_MULTIPLE:
            return f"groups of {leaf.group_size} dimensions, not a multiple of {GROUP_MULTIPLE}"
        groups = dim // leaf.group_size
        if groups * rows > MAX_SUMS:
            return f"{groups} groups with {rows} queries, more than {MAX_SUMS} products"
        dtype = leaf.dtype
    return None if dtype in ("bfloat16", "float16", "float32") else f"scales in {dtype}"


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
    decode_attention = kernel("decode_attention")
    keys = RotatedScalar.of(cache.key_quantizer, cache.keys)
    values = RotatedScalar.of(cache.value_quantizer, cache.values)
    shift = None if cache.key_mean is None else jnp.einsum("bhrd,bhd->bhr", y, cache.key_mean)
    for rotation in keys.rotations:
        y = rotation(y)
    stop = cache.coded
    start = jnp.zeros_like(stop)
    if sliding_window is not None:
        start = jnp.clip(position - sliding_window + 1 - cache.sinks, 0, stop)
    largest, total, sums = decode_attention.decode_attention(
        y * _step(keys),
        decode_attention.Packed(*_packed(keys)),
        decode_attention.Packed(*_packed(values)),
        start,
        stop,
        shift,
        softcap=softcap,
        interpret=hopper.INTERPRET.get(),
    )
    sums = sums * _step(values)
    for rotation in reversed(values.rotations):
        sums = rotation.inverse(sums)
    return attention.Sums(largest, total, sums)


def _step(part: RotatedScalar) -> Any:
    match part.leaf:
        case Scalar():
            return part.leaf.step
        case Trellis():
            return part.leaf.table.step
    return 1


def _packed(part: RotatedScalar) -> tuple[tuple[Array, ...], Array, Array | None, Any]:
    """Sections, scales, biases and levels, as the kernel takes them."""
    leaf = part.leaf
    if isinstance(leaf, Affine):
        sections, scales, biases = part.codes
        return tuple(section.bits for section in sections), _numbers(scales), _numbers(biases), None
    if isinstance(leaf, Trellis):
        assert isinstance(leaf.table, Companded)
        table = leaf.table
        levels = kernel("streams").Companded(table.multiplier, table.bends, table.offset, table.fold)
    else:
        levels = leaf.levels
    return tuple(section.bits for section in part.codes), _numbers(part.norms)[:, :, None], None, levels


def _numbers(array: TokenArray) -> Array:
    return lax.bitcast_convert_type(array.bits, array.dtype)
