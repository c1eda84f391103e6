"""Attention to the codes of a cache by a fused kernel: whether there is one, and its call."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax import kernels, tiles
from rqjax.affine import Affine
from rqjax.cache import KVCache
from rqjax.combinators import Normalized, Rotated, Scaled, Split
from rqjax.quantizer import Codes, Quantizer
from rqjax.rotations import Rotation
from rqjax.scalar import Scalar

DIMS, MAX_ROWS, MAX_BITS, GROUP = (64, 128, 256), 16, 4, 64
"""Head dimensions, queries of a key-value head, bits, and what group sizes are multiples of, that the kernel takes."""
MAX_SUMS = 32
"""Groups times queries: a kernel would run out of registers."""


class Leaf(NamedTuple):
    """A nest of quantizers as rotations, one after the other, around one quantizer of indices."""

    rotations: tuple[Rotation, ...]
    quantizer: Scalar | Affine
    norms: tiles.Timed | None
    codes: Codes


def leaf(quantizer: Quantizer, codes: Codes) -> Leaf | None:
    """The nest as a `Leaf` if it is one whose products the kernel takes."""
    match quantizer:
        case Normalized() | Scaled():
            inner = leaf(quantizer.inner, codes[1])
            if inner is None or inner.norms is not None or not isinstance(inner.quantizer, Scalar):
                return None
            return inner._replace(norms=codes[0])
        case Rotated():
            inner = leaf(quantizer.inner, codes)
            return inner and inner._replace(rotations=(quantizer.rotation, *inner.rotations))
        case Split() if len(quantizer.parts) == 1:
            return leaf(quantizer.parts[0], codes[0])
        case Scalar() if tiles.has_indices(quantizer):
            return Leaf((), quantizer, None, codes)
        case Affine():
            return Leaf((), quantizer, None, codes)
    return None


def check(cache: KVCache, time: int, q_heads: int, mask: Any, sliding_window: Any) -> str:
    """The name of the kernel for queries of `time` tokens, "mosaic_gpu".

    Raises:
      Unsupported: there is none; the message says why.
    """
    if reason := _reason(cache, time, q_heads, mask, sliding_window):
        raise kernels.Unsupported(f"no mosaic_gpu kernel for this attention: {reason}")
    return "mosaic_gpu"


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
    if time > 1 and (sliding_window is not None or time > cache.window + 1):
        return f"the {time} queries of a sequence do not all see the same codes"
    sides = ("keys", cache.key_quantizer, cache.keys), ("values", cache.value_quantizer, cache.values)
    for name, quantizer, codes in sides:
        if reason := _unsupported_codes(quantizer, codes, dim, rows):
            return f"{name}: {reason}"
    return None


def _unsupported_codes(quantizer: Quantizer, codes: Codes, dim: int, rows: int) -> str | None:
    found = leaf(quantizer, codes)
    if found is None:
        return "the nest is not rotations and a norm around one Scalar of int8 levels, nor rotations around an Affine"
    inner = found.quantizer
    if inner.bits > MAX_BITS:
        return f"{inner.bits} bits, more than {MAX_BITS}"
    if isinstance(inner, Scalar):
        if found.norms is None:
            return "a Scalar without a norm"
        if not inner.symmetric:
            return "the levels of the Scalar are not marked as symmetric"
        dtype = found.norms.dtype
    else:
        if inner.group_size % GROUP:
            return f"groups of {inner.group_size} dimensions, not a multiple of {GROUP}"
        groups = dim // inner.group_size
        if groups * rows > MAX_SUMS:
            return f"{groups} groups with {rows} queries, more than {MAX_SUMS} products"
        dtype = inner.dtype
    return None if dtype in ("bfloat16", "float16", "float32") else f"scales in {dtype}"


def past(
    cache: KVCache,
    y: Float[Array, "b h r d"],
    position: Int[Array, "batch"],
    sliding_window: int | None,
    softcap: float | int | None,
) -> tuple[Float[Array, "b h r"], Float[Array, "b h r"], Float[Array, "b h r d"]]:
    """The softmax sums over the tokens in codes: the largest score, the total weight, the weighted values.

    Args:
      cache: the cache.
      y: scaled queries.
      position: of the queries of each sequence.
      sliding_window, softcap: as in `attention.attend`.
    """
    decode_attention = kernels.kernel("decode_attention")
    keys, values = leaf(cache.key_quantizer, cache.keys), leaf(cache.value_quantizer, cache.values)
    assert keys is not None
    assert values is not None
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
        interpret=kernels.INTERPRET.get(),
    )
    sums = sums * _step(values)
    for rotation in reversed(values.rotations):
        sums = rotation.inverse(sums)
    return largest, total, sums


def _step(part: Leaf) -> Any:
    return part.quantizer.step if isinstance(part.quantizer, Scalar) else 1


def _packed(part: Leaf) -> tuple[tuple[Array, ...], Array, Array | None, Any]:
    """Sections, scales, biases and levels, as the kernel takes them."""
    if isinstance(part.quantizer, Scalar):
        assert part.norms is not None
        return (
            tuple(section.bits for section in part.codes),
            _numbers(part.norms)[:, :, None],
            None,
            part.quantizer.levels,
        )
    sections, scales, biases = part.codes
    return tuple(section.bits for section in sections), _numbers(scales), _numbers(biases), None


def _numbers(timed: tiles.Timed) -> Array:
    return lax.bitcast_convert_type(timed.bits, timed.dtype)
