"""Attention to the codes of a cache by a fused kernel: whether there is one, and its call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.arrays import norms
from rqjax.backends import hopper, hopper_columns
from rqjax.backends.hopper import RotatedScalar
from rqjax.backends.hopper_stages import kernel
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.codebooks.trellis_tables import Companded
from rqjax.core import Codes, Quantizer, Refusal, register
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.per_coordinate import Columns
from rqjax.quantizers.per_head import PerHead, over_heads
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis
from rqjax.quantizers.trellis_per_coordinate import TrellisColumns
from rqjax.scoring import rules
from rqjax.scoring.tiles import TokenArray

DIMS, MAX_ROWS, MAX_BITS, GROUP_MULTIPLE = (64, 128, 256), 16, 4, 64
"""Head dimensions, queries of a key-value head, bits, and what group sizes are multiples of, that the kernel takes."""
MAX_SUMS, MAX_COLUMNS = 32, 256
"""Groups times queries, and columns of levels: a kernel would run out of registers."""


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
    if cache.tables is not None:
        return "codes lie in pages"
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
    found = _part(quantizer, codes)
    leaf, normed = found.leaf, found.norms is not None
    if isinstance(leaf, TrellisColumns | Columns):
        return _unsupported_transform(leaf, isinstance(quantizer, PerHead))
    if not isinstance(leaf, Scalar | Trellis | Affine) or (isinstance(leaf, Affine) and normed):
        return "the nest is not rotations and a norm around one Scalar or Trellis, nor rotations around an Affine"
    if leaf.bits > MAX_BITS:
        return f"{leaf.bits} bits, more than {MAX_BITS}"
    if not isinstance(leaf, Affine):
        if not normed:
            return f"a {type(leaf).__name__} without a norm"
        if isinstance(leaf, Trellis) and not leaf.companded:
            return "the levels of the Trellis are in a table"
        if isinstance(leaf, Scalar) and not (rules.in_integers(leaf) and leaf.symmetric):
            return "the levels of the Scalar are not in int8, or not marked as symmetric"
        if isinstance(leaf, Scalar) and isinstance(quantizer, PerHead):
            return "a Scalar of each head"
        return None
    if leaf.group_size % GROUP_MULTIPLE:
        return f"groups of {leaf.group_size} dimensions, not a multiple of {GROUP_MULTIPLE}"
    groups = dim // leaf.group_size
    if groups * rows > MAX_SUMS:
        return f"{groups} groups with {rows} queries, more than {MAX_SUMS} products"
    return None if leaf.dtype in ("bfloat16", "float16", "float32") else f"scales in {leaf.dtype}"


def _unsupported_transform(leaf: TrellisColumns | Columns, per_head: bool) -> str | None:
    name = type(leaf).__name__
    if not rules.in_integers(leaf):
        return f"the levels of the {name} are not whole numbers, or not of a stream of bits"
    if sum(leaf.bits) >= (MAX_BITS + 1) * leaf.dim:
        return f"{sum(leaf.bits) // leaf.dim} bits, more than {MAX_BITS}"
    found = jax.eval_shape(functools.partial(hopper_columns.lookup, per_head=per_head), leaf)
    columns, size, largest = found.starts.shape[0], found.levels.shape[1], kernel("columns").MAX_SIZE
    if columns > MAX_COLUMNS:
        return f"{columns} columns of levels, more than {MAX_COLUMNS}"
    return f"{size} bytes of levels, more than {largest}" if size > largest else None


def _part(quantizer: Quantizer, codes: Codes = None) -> RotatedScalar:
    """The record of a nest; of a `PerHead` its arrays have the heads first."""
    return RotatedScalar.of(quantizer.inner if isinstance(quantizer, PerHead) else quantizer, codes)


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
    shift = None if cache.key_mean is None else jnp.einsum("bhrd,bhd->bhr", y, cache.key_mean)
    stop = cache.coded
    start = jnp.zeros_like(stop)
    if sliding_window is not None:
        start = jnp.clip(position - sliding_window + 1 - cache.sinks, 0, stop)
    largest, total, sums = decode_attention.decode_attention(
        _by_head(_as_multiplied, cache.key_quantizer, y),
        decode_attention.Packed(*_packed(cache.key_quantizer, cache.keys)),
        decode_attention.Packed(*_packed(cache.value_quantizer, cache.values)),
        start,
        stop,
        shift,
        dim=y.shape[-1],
        softcap=softcap,
        interpret=hopper.INTERPRET.get(),
    )
    return attention.Sums(largest, total, _by_head(_restored, cache.value_quantizer, sums))


def _by_head(function: Callable[[Quantizer, Array], Array], quantizer: Quantizer, x: Array) -> Array:
    """A function of x (batch, heads, ...), by the quantizer or by that of each head."""
    return over_heads(function)(quantizer, x) if isinstance(quantizer, PerHead) else function(quantizer, x)


def _as_multiplied(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Float[Array, "b h r n"]:
    """Queries as they are multiplied with levels."""
    part = RotatedScalar.of(quantizer)
    for rotation in part.rotations:
        y = rotation(y)
    transform = isinstance(part.leaf, TrellisColumns | Columns)
    return hopper_columns.queries(part.leaf, y) if transform else y * _step(part.leaf)


def _restored(quantizer: Quantizer, sums: Float[Array, "b h r n"]) -> Float[Array, "b h r d"]:
    """What sums of levels stand for."""
    part = RotatedScalar.of(quantizer)
    transform = isinstance(part.leaf, TrellisColumns | Columns)
    sums = hopper_columns.restored(part.leaf, sums) if transform else sums * _step(part.leaf)
    for rotation in reversed(part.rotations):
        sums = rotation.inverse(sums)
    return sums


def _step(leaf: Any) -> Any:
    match leaf:
        case Scalar():
            return leaf.step
        case Trellis():
            return leaf.table.step
    return 1


def _packed(quantizer: Quantizer, codes: Codes) -> tuple[tuple[Array, ...], Array, Array | None, Any]:
    """Sections, scales, biases and levels, as the kernel takes them."""
    part = _part(quantizer, codes)
    leaf = part.leaf
    if isinstance(leaf, Affine):
        sections, scales, biases = part.codes
        return tuple(section.bits for section in sections), _numbers(scales), _numbers(biases), None
    if isinstance(leaf, TrellisColumns | Columns):
        levels = hopper_columns.lookup(leaf, per_head=isinstance(quantizer, PerHead))
    elif isinstance(leaf, Trellis):
        assert isinstance(leaf.table, Companded)
        table = leaf.table
        levels = kernel("streams").Companded(table.multiplier, table.bends, table.offset, table.fold)
    else:
        levels = leaf.levels
    sections = tuple(section.bits for section in part.codes)
    scales = jnp.ones_like(sections[0][:, :, 0], jnp.bfloat16) if part.norms is None else _numbers(part.norms)
    return sections, scales[:, :, None], None, levels


def _numbers(array: TokenArray) -> Array:
    """Numbers that are stored, in floating point."""
    numbers = lax.bitcast_convert_type(array.bits, array.dtype)
    return norms.restored(numbers) if array.dtype == norms.LOGARITHMIC else numbers
