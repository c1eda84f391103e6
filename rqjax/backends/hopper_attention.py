"""Attention to the codes of a cache by a fused kernel: whether there is one, and its call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.packed import Packed
from rqjax.backends import hopper, hopper_columns, nests
from rqjax.backends.hopper_stages import kernel
from rqjax.cache import attention
from rqjax.cache.kv import KVCache
from rqjax.codebooks.trellis_tables import Companded
from rqjax.core import Codes, Quantizer, Refusal, register
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.per_coordinate import PerCoordinate
from rqjax.quantizers.per_head import PerHead
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis
from rqjax.quantizers.trellis_per_coordinate import TrellisPerCoordinate

GROUP_MULTIPLE = 64
"""What group sizes are multiples of, that the kernel takes."""
MAX_SUMS, MAX_COLUMNS = 32, 256
"""Groups times queries, and columns of levels: a kernel would run out of registers."""


@register("mosaic_gpu", "attend", KVCache)
def attender(
    cache: KVCache, q: Array, mask: Array | None, *, sliding_window: int | None, softcap: Any, **options: Any
) -> Callable[..., Array] | Refusal:
    """Attention by the kernel for queries (batch, time, q_heads, head_dim)."""
    if refusal := hopper.refusal_of_device():
        return refusal
    _, time, q_heads, _ = q.shape
    if reason := _reason(cache, time, q_heads, mask, sliding_window, softcap):
        return Refusal(f"no mosaic_gpu kernel for this attention: {reason}")
    return functools.partial(attention.attend_with, kernel=past)


def _reason(cache: KVCache, time: int, q_heads: int, mask: Any, *options: Any) -> str | None:
    if reason := nests.reason_of_queries(cache, time, q_heads, mask, *options):
        return reason
    turned = cache.rope is not None and cache.key_mean is not None
    if turned and not isinstance(nests.part(cache.key_quantizer).leaf, Scalar | Affine):
        return "keys: a mean that turns, around other than a Scalar or an Affine"
    rows = q_heads // cache.exact_keys.shape[1] * time
    sides = ("keys", cache.key_quantizer, cache.keys), ("values", cache.value_quantizer, cache.values)
    for name, quantizer, codes in sides:
        if reason := _unsupported_codes(quantizer, codes, rows):
            return f"{name}: {reason}"
    return None


def _unsupported_codes(quantizer: Quantizer, codes: Codes, rows: int) -> str | None:
    found = nests.part(quantizer, codes)
    leaf = found.leaf
    if isinstance(leaf, TrellisPerCoordinate | PerCoordinate):
        return _unsupported_transform(leaf, isinstance(quantizer, PerHead))
    if isinstance(leaf, Trellis):
        if leaf.bits > nests.MAX_BITS:
            return f"{leaf.bits} bits, more than {nests.MAX_BITS}"
        if found.norms is None:
            return "a Trellis without a norm"
        return None if leaf.in_integers else "the levels of the Trellis are in a table"
    reason = nests.reason_of_leaf(found, isinstance(quantizer, PerHead), "Scalar or Trellis")
    if reason or not isinstance(leaf, Affine):
        return reason
    if leaf.group_size % GROUP_MULTIPLE:
        return f"groups of {leaf.group_size} dimensions, not a multiple of {GROUP_MULTIPLE}"
    groups = leaf.dim // leaf.group_size
    return f"{groups} groups with {rows} queries, more than {MAX_SUMS} products" if groups * rows > MAX_SUMS else None


def _unsupported_transform(leaf: TrellisPerCoordinate | PerCoordinate, per_head: bool) -> str | None:
    name = type(leaf).__name__
    if not leaf.in_integers:
        return f"the levels of the {name} are not whole numbers, or not of a stream of bits"
    if sum(leaf.bits) >= (nests.MAX_BITS + 1) * leaf.dim:
        return f"{sum(leaf.bits) // leaf.dim} bits, more than {nests.MAX_BITS}"
    found = jax.eval_shape(functools.partial(hopper_columns.lookup, per_head=per_head), leaf)
    columns, size, largest = found.starts.shape[0], found.levels.shape[1], kernel("columns").MAX_SIZE
    if columns > MAX_COLUMNS:
        return f"{columns} columns of levels, more than {MAX_COLUMNS}"
    return f"{size} bytes of levels, more than {largest}" if size > largest else None


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
    largest, total, sums = kernel("decode_attention").decode_attention(
        nests.by_head(_as_multiplied, cache.key_quantizer, y),
        _packed(cache.key_quantizer, cache.keys),
        _packed(cache.value_quantizer, cache.values),
        *nests.bounds(cache, position, sliding_window),
        nests.shift(cache, y),
        tables=cache.tables,
        dim=y.shape[-1],
        softcap=softcap,
        interpret=hopper.INTERPRET.get(),
    )
    return attention.Sums(largest, total, nests.by_head(_restored, cache.value_quantizer, sums))


def _as_multiplied(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Float[Array, "b h r n"]:
    """Queries as they are multiplied with levels."""
    found = nests.RotatedScalar.of(quantizer)
    y, leaf = found.rotated(y), found.leaf
    return (
        hopper_columns.queries(leaf, y) if isinstance(leaf, TrellisPerCoordinate | PerCoordinate) else y * _step(leaf)
    )


def _restored(quantizer: Quantizer, sums: Float[Array, "b h r n"]) -> Float[Array, "b h r d"]:
    """What sums of levels stand for."""
    found = nests.RotatedScalar.of(quantizer)
    leaf = found.leaf
    transform = isinstance(leaf, TrellisPerCoordinate | PerCoordinate)
    return found.rotated_back(hopper_columns.restored(leaf, sums) if transform else sums * _step(leaf))


def _step(leaf: Any) -> Any:
    return leaf.table.step if isinstance(leaf, Trellis) else nests.step(leaf)


def _packed(quantizer: Quantizer, codes: Codes) -> Packed:
    found = nests.part(quantizer, codes)
    leaf = found.leaf
    if isinstance(leaf, Affine | Scalar):
        return nests.packed(found)
    if isinstance(leaf, TrellisPerCoordinate | PerCoordinate):
        levels = hopper_columns.lookup(leaf, per_head=isinstance(quantizer, PerHead))
    else:
        assert isinstance(leaf.table, Companded)
        table = leaf.table
        levels = kernel("streams").Companded(table.multiplier, table.bends, table.offset, table.fold)
    sections = (found.codes.array.bits,)
    scales = jnp.ones_like(sections[0][:, :, 0], jnp.bfloat16) if found.norms is None else nests.numbers(found.norms)
    return Packed(sections, scales[:, :, None], None, levels)
