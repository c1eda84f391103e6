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
    first: Int[Array, "b 1 r 1"],
    stop: Int[Array, "b 1 r 1"],
    mask: Bool[Array, "#b #h #r t"] | None,
    part: Callable[..., Sums],
) -> Sums:
    """Sums over the tokens in codes, block by block; values still as `rules.weigh` leaves them.

    A query sees the tokens in codes from `first` on and before `stop`, those that `mask` allows.
    """
    batch, kv_heads, _, dim = cache.exact_keys.shape
    count = stop.shape[2]
    widest = max(4 * cache.pre_rope, *map(rules.width, (cache.key_quantizer, cache.value_quantizer)))
    large = max(BLOCK_BYTES // (batch * kv_heads * max(widest * dim, 4 * count)), tiles.PAGE)
    large = min(large, integers.TOKENS)
    large = min(cache.capacity, 1 << large.bit_length() - 1)
    small = min(large, max(large // 8 // tiles.PAGE, 1) * tiles.PAGE)
    allowed = mask if mask is None else padded(mask, cache.sinks + cache.capacity - cache.max_len, axis=3)

    def block(at, size, before):
        start = jnp.minimum(at, cache.capacity - size)  # the last block may reach back into the one before

        def read(codes, after):
            """A block of codes, after what has been computed of the block before: all are unpacked into one memory.
            Floats are copied only to be sliced."""
            arrays = over(lambda leaf: leaf.read(start, size, cache.tables), codes)
            whole = size == cache.capacity and cache.tables is None
            return jax.tree.map(lambda x: x if whole and x.dtype != jnp.uint8 else materialized(x, after), arrays)

        def weigh(w):
            return rules.weigh(cache.value_quantizer, w, read(cache.value_codes, w))

        t = start + jnp.arange(size)
        seen = (t >= jnp.maximum(first, at)) & (t < stop)
        if allowed is not None:
            seen &= lax.dynamic_slice_in_dim(allowed, cache.sinks + start, size, 3)
        return part(score(read(cache.keys, before), cache.sinks + start), seen, weigh)

    shapes = jax.eval_shape(lambda: block(0, small, jnp.zeros((1, 1, 1))))
    sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums = sums._replace(largest=jnp.full(shapes.largest.shape, NEVER))
    at, last = first.min() // tiles.PAGE * tiles.PAGE, stop.max()
    for size in dict.fromkeys((large, small)):  # as many large ones as are at least half full
        blocks = jnp.maximum(last - at + (size // 2 if size > small else size - 1), 0) // size
        add = lambda i, sums, at=at, size=size: merged(sums, block(at + i * size, size, sums.total))  # noqa: E731
        sums = lax.fori_loop(0, blocks, add, sums)
        at = at + blocks * size
    return sums


def padded(x: Array, count: int, axis: int = 1) -> Array:
    """With zeros behind along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, max(count, 0))
    return jnp.pad(x, widths)
