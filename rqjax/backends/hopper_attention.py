"""Attention to the codes of a cache on NVIDIA GPUs: the limits of its kernel, and codes as it takes them."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_kernels.packed import Packed
from rqjax.backends import coded_attention, hopper_columns, nests
from rqjax.backends.hopper_calls import INTERPRET, kernel
from rqjax.backends.hopper_columns import TransformCode
from rqjax.cache import attention
from rqjax.cache.key_forms import TurnedMean
from rqjax.cache.kv import KVCache
from rqjax.core import Codes, Quantizer
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.per_head import PerHead
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis

GROUP_MULTIPLE = 64
"""Number that divides the group sizes that the kernel takes."""
MAX_SUMS, MAX_COLUMNS = 32, 256
"""Most groups times queries, and most columns of levels; beyond them a kernel runs out of registers."""


def _limits(cache: KVCache, quantizer: Quantizer, codes: Codes, rows: int) -> str | None:
    """Returns why the kernel does not take keys or values for so many queries a head, or None."""
    found = nests.part(quantizer, codes)
    leaf = found.leaf
    form, of_keys = cache.key_form, quantizer is cache.key_quantizer
    if cache.values_in_keys:
        return _limits_of_latent(cache, quantizer, found)
    turned = of_keys and isinstance(form, TurnedMean) and form.mean is not None
    if turned and not isinstance(leaf, Scalar | Affine):
        return "a mean that turns, around other than a Scalar or an Affine"
    late = of_keys and form.turns_late
    if late and isinstance(leaf, Affine):
        return "an Affine of keys before they turn with their positions"
    if late and quantizer.dim not in kernel("turning").DIMS:
        return f"{quantizer.dim} dimensions before they turn with their positions, not {kernel('turning').DIMS}"
    if isinstance(leaf, TransformCode):
        most = kernel("turning").MAX_COLUMNS if late else MAX_COLUMNS
        return _limits_of_transform(leaf, isinstance(quantizer, PerHead), most)
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


def _limits_of_latent(cache: KVCache, quantizer: Quantizer, found: nests.RotatedScalar) -> str | None:
    """Returns why the kernel does not take one of the two parts of keys that end with their values, or None."""
    dims, latents = tuple(part.dim for part, _ in nests.sides(cache)), kernel("latents")
    if dims not in {*itertools.product(latents.DIMS, latents.VALUE_DIMS)}:
        return f"parts of {dims} dimensions, not one of {latents.DIMS} and behind it one of {latents.VALUE_DIMS}"
    if cache.key_form.turns_late:
        return "parts of keys before they turn with their positions"
    if not isinstance(found.leaf, Scalar):
        return f"{type(found.leaf).__name__} around which values are parts of keys, not Scalar"
    return nests.reason_of_leaf(found, isinstance(quantizer, PerHead))


def _limits_of_transform(leaf: TransformCode, per_head: bool, most: int) -> str | None:
    name = type(leaf).__name__
    if not leaf.in_integers:
        return f"the levels of the {name} are not whole numbers, or not of a stream of bits"
    if sum(leaf.bits) >= (nests.MAX_BITS + 1) * leaf.dim:
        return f"{sum(leaf.bits) // leaf.dim} bits, more than {nests.MAX_BITS}"
    found = jax.eval_shape(functools.partial(hopper_columns.lookup, per_head=per_head), leaf)
    columns, size, largest = found.starts.shape[0], found.levels.shape[1], kernel("columns").MAX_SIZE
    if columns > most:
        return f"{columns} columns of levels, more than {most}"
    return f"{size} bytes of levels, more than {largest}" if size > largest else None


def _multiplied(leaf: Any, y: Array) -> Array:
    return hopper_columns.queries(leaf, y) if isinstance(leaf, TransformCode) else y * _step(leaf)


def _restored(leaf: Any, sums: Array) -> Array:
    return hopper_columns.restored(leaf, sums) if isinstance(leaf, TransformCode) else sums * _step(leaf)


def _step(leaf: Any) -> Any:
    return leaf.table.step if isinstance(leaf, Trellis) else nests.step(leaf)


def _packed(quantizer: Quantizer, codes: Codes) -> Packed:
    found = nests.part(quantizer, codes)
    leaf = found.leaf
    if isinstance(leaf, Affine | Scalar):
        return nests.packed(found)
    if isinstance(leaf, TransformCode):
        levels = hopper_columns.lookup(leaf, per_head=isinstance(quantizer, PerHead))
    else:
        with jax.ensure_compile_time_eval():  # of static numbers alone
            numbers = np.asarray(leaf.table(jnp.arange(2**leaf.table.state_bits, dtype=jnp.uint8)))
        levels = kernel("rings").StateLevels(tuple(numbers.tolist()))
    sections = (found.codes.array.bits,)
    scales = jnp.ones_like(sections[0][:, :, 0], jnp.bfloat16) if found.norms is None else nests.numbers(found.norms)
    return Packed(sections, scales[:, :, None], None, levels)


def _turning(cache: KVCache) -> Any:
    """Returns `Turning` of a cache of keys before they turn."""
    rope: Any = cache.key_form.rope
    dim, turning = cache.key_quantizer.dim, kernel("turning")
    count, half = rope.turning(dim), dim // 2
    at = np.arange(dim)
    order = np.concatenate(
        [part for k in range(2) for part in (np.split(at[:count], 2)[k], np.split(at[count:], 2)[k])]
    )
    frequencies = np.pad(rope.frequencies(dim), (0, half - count // 2))
    begins = cache.sinks + turning.SPAN * jnp.arange(cache.capacity // turning.SPAN, dtype=jnp.float32)
    angles = begins[:, None] * frequencies
    matrix = _of_unit_vectors(ATTENTION.as_multiplied, cache.key_quantizer, cache, np.eye(dim, dtype=np.float32)[order])
    lengths = np.where(at < count, rope.length, 1).astype(np.float32)
    begins = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    return turning.Turning(jnp.asarray(np.diag(lengths)[:, order]), matrix[0], frequencies, begins)


def _angles(cache: KVCache) -> Any:
    """Returns `Angles` of a cache that turns queries to their positions, else None."""
    rope, dim, positions = cache.key_form.rope, cache.key_quantizer.dim, kernel("positions")
    if rope is None:
        return None
    rests = np.arange(-cache.sinks, positions.SPAN)[:, None] * rope.frequencies(dim).astype(np.float64)
    within = rope.length * np.concatenate([np.cos(rests), np.sin(rests)], axis=1)
    room = -(-max(cache.max_len - cache.sinks, 1) // positions.SPAN) * positions.SPAN
    begins = jnp.concatenate(rope.begins(dim, cache.sinks, room), axis=1)
    fast, slow = rope.spans(dim)
    return positions.Angles(
        begins, jnp.asarray(within, jnp.float32), jnp.asarray(rope.length * fast), jnp.asarray(slow)
    )


def _of_unit_vectors(function: Any, quantizer: Quantizer, cache: KVCache, vectors: Any) -> Array:
    """Applies a function of a quantizer to vectors (n, d): (1, heads, n, ...), one head if all have one quantizer."""
    heads = cache.exact_keys.shape[1] if isinstance(quantizer, PerHead) else 1
    return nests.by_head(function, quantizer, jnp.broadcast_to(vectors, (1, heads, *vectors.shape)))


def _attend(*operands: Any, **options: Any) -> Any:
    return kernel("decode_attention").decode_attention(*operands, interpret=INTERPRET.get(), **options)


ATTENTION = coded_attention.CodedAttention(_limits, _attend, _packed, _multiplied, _restored, _turning, latents=True)


def attend(cache: KVCache, q: Array, mask: None, new: Any, **options: Any) -> Array:
    """`attention.attend_with` by the kernel, in three launches for one token of each sequence."""
    if q.shape[1] > 1 or new is not None or not _has_prologue(cache, q):
        return attention.attend_with(cache, q, mask, new, past=ATTENTION.past, **options)
    return _attend_one(cache, q, **options)


def _has_prologue(cache: KVCache, q: Any) -> bool:
    dtypes, dim = {q.dtype.name, cache.exact_keys.dtype.name}, q.shape[3]
    if cache.values_in_keys or not dtypes <= {*kernel("launch").DTYPES}:
        return False
    most = kernel("warp_attention").most_rows(*_sides(cache), dim, turned=cache.key_form.turns_late)
    return q.shape[2] // cache.exact_keys.shape[1] <= most


def _attend_one(
    cache: KVCache,
    q: Array,
    *,
    scale: Any,
    sliding_window: int | None,
    softcap: float | None,
    sink_logits: Array | None,
) -> Array:
    one = kernel("attention")
    return one.attend(
        q,
        (cache.exact_keys, cache.exact_values),
        cache.lengths,
        cache.held,
        *_sides(cache),
        constants(cache) if cache.constants is None else cache.constants,
        jnp.asarray(scale, jnp.float32).reshape(1),
        cache.key_form.mean,
        sink_logits,
        window=one.Window(cache.sinks, cache.window, cache.unit, sliding_window),
        tables=cache.tables,
        softcap=softcap,
        interpret=INTERPRET.get(),
    )


def enter(cache: KVCache, k: Array, v: Array, lengths: Array, count: Array) -> Any:
    """`append.entered` for one token of each sequence."""
    window = kernel("attention").Window(cache.sinks, cache.window, cache.unit, None)
    operands = cache.exact_keys, cache.exact_values, k, v, lengths, count, cache.held
    keys, values, unit = kernel("append_token").append_token(*operands, window=window, interpret=INTERPRET.get())
    return (keys, values), (unit[: len(k)], unit[len(k) :])


def limits_to_enter(cache: KVCache, k: Any, v: Any, lengths: Any, count: Any) -> str | None:
    """Returns why no kernel enters tokens into a cache, or None."""
    if k.shape[2] > 1 or cache.values_in_keys:
        return "there are several tokens, or values are a part of the keys"
    if cache.sliding_window:
        return "the cache keeps a window of tokens alone"
    known, dtypes = kernel("launch").DTYPES, {x.dtype.name for x in (k, v, cache.exact_keys)}
    return None if dtypes <= {*known} else f"tokens in {', '.join(dtypes)}, not in {', '.join(known)}"


def constants(cache: KVCache) -> Any:
    """Constants of the kernels: rotations and steps of levels as matrices, and tables of levels."""
    if cache.key_form.turns_late:
        multiplied = _turning(cache)
    else:
        units = jnp.eye(cache.key_quantizer.dim)
        multiplied = _of_unit_vectors(ATTENTION.as_multiplied, cache.key_quantizer, cache, units)[0]
    quantizer = cache.value_quantizer

    def restored(sums: Array) -> Array:
        return _of_unit_vectors(ATTENTION.as_restored, quantizer, cache, sums[0, 0])

    return kernel("attention").constants(*_sides(cache), multiplied, restored, _angles(cache))


def _sides(cache: KVCache) -> tuple[Packed, Packed]:
    keys, values = (_packed(*side) for side in nests.sides(cache))
    return keys, values


def limits_of_constants(name: str, cache: KVCache) -> str | None:
    """Returns why a cache has no constants, or None."""
    _, heads, _, dim = cache.exact_keys.shape
    q = jax.ShapeDtypeStruct((1, 1, heads, dim), cache.exact_keys.dtype)
    if reason := ATTENTION.reason(name, cache, q, None, None, sliding_window=None, softcap=None):
        return reason
    return None if _has_prologue(cache, q) else f"no {name} kernel of this attention has constants"
