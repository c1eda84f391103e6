"""Sums over the tokens of a cache that are in codes, block by block."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.arrays.planes import materialized
from rqjax.cache.kv import KVCache, over
from rqjax.cache.queries import Queries
from rqjax.cache.sums import NEVER, Sums, merged
from rqjax.core import PAGE, Codes, Quantizer, platforms
from rqjax.core.mesh import varying
from rqjax.scoring import integers

BLOCK_BYTES, GPU_BLOCK_BYTES = 2**23, 2**29
"""Bytes of keys, and of scores, that are unpacked at once: one a coordinate in int8, four in float32. The rest of a
history that does not fill half a block is taken in blocks of an eighth. A GPU takes all that there is room for, since
the host would have to read how many blocks there are, and launches a dozen kernels for each."""


def coded_sums(cache: KVCache, queries: Queries) -> Sums:
    """Sums over the tokens in codes, block by block."""
    batch, kv_heads, count, dim = queries.y.shape
    keys, values, form = cache.key_quantizer, cache.value_quantizer, cache.key_form
    prepared = keys.prepare(form.probes(queries.y))
    widest = max(4 * form.turns_late, keys.width, values.width)
    room = GPU_BLOCK_BYTES if platforms.on_gpu() else BLOCK_BYTES
    large = max(room // (batch * kv_heads * max(widest * dim, 4 * count)), PAGE)
    large = min(large, integers.TOKENS)
    large = min(cache.capacity, 1 << large.bit_length() - 1)
    small = large if platforms.on_gpu() else min(large, max(large // 8 // PAGE, 1) * PAGE)
    first, stop = queries.coded(cache)

    def block(at, size, before):
        start = jnp.minimum(at, cache.capacity - size)  # the last block may reach back into the one before

        def read(codes, after):
            """Reads a block of codes. It depends on the previous block's result, so that XLA reuses one buffer. Floats
            are copied only to be sliced."""
            arrays = over(lambda leaf: leaf.read(start, size, cache.tables), codes)
            whole = size == cache.capacity and cache.tables is None
            return jax.tree.map(lambda x: x if whole and x.dtype != jnp.uint8 else materialized(x, after), arrays)

        seen = queries.sees_codes(cache, jnp.maximum(first, at), stop, start, size)
        scores = form.scores(queries.y, keys.scores(prepared, read(cache.keys, before)), cache.sinks + start)
        return queries.sums(scores, seen, lambda w: values.weigh(w, read(cache.value_codes, w)))

    shapes = jax.eval_shape(lambda: block(0, small, jnp.zeros((1, 1, 1))))
    sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums = sums._replace(largest=jnp.full(shapes.largest.shape, NEVER))
    sums = varying(sums, queries, jax.tree.leaves(cache))
    at, last = 0, cache.capacity
    if not platforms.on_gpu():
        at = first.min() // PAGE * PAGE
        last = jnp.maximum(stop.max(), at)  # a sliding window may begin behind all codes
    for size in dict.fromkeys((large, small)):  # as many large ones as are at least half full
        blocks = (last - at + (size // 2 if size > small else size - 1)) // size  # below 0 if nothing is left
        add = lambda i, sums, at=at, size=size: merged(sums, block(at + i * size, size, sums.total))  # noqa: E731
        sums = lax.fori_loop(0, blocks, add, sums)
        at = at + blocks * size
    return with_mean(cache, sums._replace(values=values.restore(sums.values)))


def with_mean(cache: KVCache, sums: Sums) -> Sums:
    """Adds to sums of values that are parts of keys the mean that codes of keys lack."""
    mean, dim = cache.key_form.mean, sums.values.shape[-1]
    if mean is None or not cache.values_in_keys:
        return sums
    return sums._replace(values=sums.values + sums.total[..., None] * mean[:, :, None, -dim:])


def float_sums(cache: KVCache, queries: Queries) -> Sums:
    """Differentiable `coded_sums`: products with decoded vectors, page by page."""
    y, (first, stop) = queries.y, queries.coded(cache)

    @jax.checkpoint
    def add(sums: Sums, start: Array) -> tuple[Sums, None]:
        keys, values = (jnp.where(jnp.isfinite(x), x, 0) for x in decoded_page(cache, start))
        seen = queries.sees_codes(cache, first, stop, start, PAGE)
        scores = jnp.einsum("bhrd,bhtd->bhrt", y, keys, precision=lax.Precision.HIGHEST)
        weigh = functools.partial(jnp.einsum, "bhtd,bhrt->bhrd", values, precision=lax.Precision.HIGHEST)
        return merged(sums, queries.sums(scores, seen, weigh)), None

    none = jnp.zeros(y.shape[:3])
    sums = Sums(none + NEVER, none, jnp.zeros((*y.shape[:3], cache.value_quantizer.dim)))
    sums = varying(sums, queries, jax.tree.leaves(cache))
    return lax.scan(add, sums, jnp.arange(0, cache.capacity, PAGE))[0]


def decoded_page(
    cache: KVCache, start: Int[Array, ""]
) -> tuple[Float[Array, "b h page d"], Float[Array, "b h page value_dim"]]:
    """Decodes keys and values of the page that begins `start` tokens after the sinks."""
    batch, heads, _, dim = cache.exact_keys.shape
    eye, form = jnp.broadcast_to(jnp.eye(dim), (batch, heads, dim, dim)), cache.key_form
    read = functools.partial(over, lambda leaf: leaf.read(start, PAGE, cache.tables))
    products = cache.key_quantizer.scores(cache.key_quantizer.prepare(form.probes(eye)), read(cache.keys))
    keys = form.scores(eye, products, cache.sinks + start)  # of unit vectors: the coordinates
    keys = jnp.swapaxes(keys, 2, 3)
    if cache.values_in_keys:
        return keys, keys[..., -cache.value_quantizer.dim :]
    return keys, decoded(cache.value_quantizer, read(cache.value_codes), True)


def decoded(quantizer: Quantizer, codes: Codes, transposed: bool) -> Float[Array, "b h t d"]:
    """Decodes a page of a cache's codes: keys by products with unit vectors, values by sums with them."""
    batch, heads = jax.tree.leaves(codes)[0].shape[:2]
    heads = quantizer.heads or heads  # some share codes
    eye = lambda n: jnp.broadcast_to(jnp.eye(n), (batch, heads, n, n))  # noqa: E731
    if transposed:
        return quantizer.restore(quantizer.weigh(eye(PAGE), codes))
    return jnp.swapaxes(quantizer.scores(quantizer.prepare(eye(quantizer.dim)), codes), 2, 3)
