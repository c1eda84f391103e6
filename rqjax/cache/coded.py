"""Sums over the tokens of a cache that are in codes, block by block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from rqjax.arrays.planes import materialized
from rqjax.cache.kv import KVCache, over
from rqjax.cache.sums import NEVER, Sums, merged
from rqjax.scoring import integers, rules, tiles

BLOCK_BYTES = 2**23
"""Bytes of keys, and of scores, that are unpacked at once: one a coordinate in int8, four in float32. The rest of a
history that does not fill half a block is taken in blocks of an eighth."""


def coded_sums(
    cache: KVCache,
    score: Callable[..., Float[Array, "b h r t"]],
    rows: Int[Array, "b 1 r 1"],
    mask: Bool[Array, "#b #h #r t"] | None,
    sliding_window: int | None,
    visible: Callable[..., Array],
    part: Callable[..., Sums],
    earlier: bool,
) -> Sums:
    """The sums over all tokens in codes, block by block; values still as `rules.weigh` leaves them.

    `earlier`: all of them come before all queries, because these are within the window.
    """
    batch, kv_heads, _, dim = cache.exact_keys.shape
    count = rows.shape[2]
    widest = max(4 * cache.pre_rope, *map(rules.width, (cache.key_quantizer, cache.value_quantizer)))
    large = max(BLOCK_BYTES // (batch * kv_heads * max(widest * dim, 4 * count)), tiles.PAGE)
    large = min(large, integers.TOKENS)
    large = min(cache.capacity, 1 << large.bit_length() - 1)
    small = min(large, max(large // 8 // tiles.PAGE, 1) * tiles.PAGE)
    coded = cache.coded
    allowed = mask if mask is None else padded(mask, cache.sinks + cache.capacity - cache.max_len, axis=3)

    def block(first, size, before):
        start = jnp.minimum(first, cache.capacity - size)  # the last block may reach back into the one before

        def read(codes, after):
            """A block of codes, after what has been computed of the block before: all are unpacked into one memory.
            Floats are copied only to be sliced."""
            arrays = over(lambda leaf: leaf.read(start, size, cache.tables), codes)
            whole = size == cache.capacity and cache.tables is None
            return jax.tree.map(lambda x: x if whole and x.dtype != jnp.uint8 else materialized(x, after), arrays)

        def weigh(w):
            return rules.weigh(cache.value_quantizer, w, read(cache.value_codes, w))

        t = start + jnp.arange(size)
        present = (t >= first) & (t < coded[:, None])
        here = allowed
        if here is not None:
            here = lax.dynamic_slice_in_dim(here, cache.sinks + start, size, 3)
        scores = score(read(cache.keys, before), cache.sinks + start)
        return part(scores, visible(cache.sinks + t[None], present, here, past=earlier), weigh)

    shapes = jax.eval_shape(lambda: block(0, small, jnp.zeros((1, 1, 1))))
    sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums = sums._replace(largest=jnp.full(shapes.largest.shape, NEVER))
    first, last = jnp.int32(0), coded.max()
    if sliding_window is not None:
        first = jnp.maximum(rows.min() - sliding_window + 1 - cache.sinks, 0) // tiles.PAGE * tiles.PAGE
    for size in dict.fromkeys((large, small)):  # as many large ones as are at least half full
        blocks = jnp.maximum(last - first + (size // 2 if size > small else size - 1), 0) // size
        at = lambda i, sums, first=first, size=size: merged(sums, block(first + i * size, size, sums.total))  # noqa: E731
        sums = lax.fori_loop(0, blocks, at, sums)
        first = first + blocks * size
    return sums


def padded(x: Array, count: int, axis: int = 1) -> Array:
    """With zeros behind along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, max(count, 0))
    return jnp.pad(x, widths)
