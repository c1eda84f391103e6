"""Attention over a compressed cache: a running softmax over blocks of codes (Milakov & Gimelshein, 2018)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from rqjax.cache.append import append, checked_slots
from rqjax.cache.coded import GPU_BLOCK_BYTES, coded_sums, float_sums
from rqjax.cache.kv import KVCache, Tokens
from rqjax.cache.queries import Number, Queries, padded
from rqjax.cache.sums import Sums, merged, with_sinks
from rqjax.core import as_array, check_int, is_traced, operation, platforms
from rqjax.core.products import full_precision_einsum, rounded_to, weighted_sums
from rqjax.scoring.tiles import UNIT

Past: TypeAlias = Callable[[KVCache, Queries], Sums]
"""Sums over the tokens of a cache that are in codes."""
QUERY_ROWS = 128
"""Queries of one key-value head that are processed together; on a GPU as many as their scores leave room for."""


class New(NamedTuple):
    """Tokens of a call, which its own queries see in full precision; before them those that a cache with a
    `sliding_window` had."""

    keys: Float[Array, "batch heads time dim"]
    values: Float[Array, "batch heads time value_dim"]
    tokens: Int[Array, "batch time"]
    """Place of each in its sequence; -1 for padding."""
    first: Int[Array, "batch"]
    """Place of the first of the call: tokens that each sequence had before."""


def attend(
    cache: KVCache,
    q: Tokens,
    *,
    slots: Int[Array | np.ndarray, "..."] | None = None,
    scale: Number | None = None,
    mask: Shaped[Array | np.ndarray, "..."] | None = None,
    sliding_window: int | None = None,
    softcap: Number | None = None,
    sink_logits: Shaped[Array | np.ndarray, "..."] | None = None,
    new: New | None = None,
    implementation: str | None = None,
) -> Shaped[Array, "batch time q_heads value_dim"]:
    """Attention of the newest tokens to all tokens of the cache up to themselves.

    Scores come from the codes of the keys with the queries rotated once; values are summed in rotated space and the sum
    is rotated back once. Memory beyond the cache does not grow with the history: never more than a block is unpacked.
    Tokens that the window has passed are seen as codes. Of more than `window` queries the first therefore see their
    neighbors as codes; `dot_product_attention` shows tokens of one call to each other in full precision.

    Args:
      cache: the cache, to which the tokens of the queries have been appended.
      q: queries (batch, time, q_heads, head_dim); query i belongs to token lengths - time + i. Consecutive groups of
        q_heads / kv_heads query heads share a head of keys and values.
      slots: as in `append`.
      scale: factor of the scores; 1 / sqrt(head_dim), if not given.
      mask: True where a query may look, broadcastable to (batch, q_heads, time, max_len), the last axis by token.
      sliding_window: how many tokens up to itself a query sees; all, if not given. No more than the cache keeps.
      softcap: scores s become softcap tanh(s / softcap).
      sink_logits: (q_heads,), of each query head one more score in the softmax, whose value is zero, as gpt-oss learns
        them (OpenAI, 2025, arXiv:2508.10925; Miller, 2023, "Attention is off by one"); -inf is none. Neither `scale`
        nor `softcap` applies to them.
      new: the queries' own tokens, to be seen in full precision whatever the cache has of them, as
        `dot_product_attention` makes them.
      implementation: how codes are attended to: "xla" for all caches, devices and options, "mosaic_gpu" for a fused
        kernel on Hopper GPUs, "mosaic_tpu" for one on TPUs, "mps" for MLX's products on Apple GPUs, None for the kernel
        wherever there is one.

    Returns:
      (batch, time, q_heads, value_dim) in the dtype of q; zeros where a query sees nothing.

    Raises:
      TypeError: q or `sink_logits` are not of floating-point numbers, or the cache is no KVCache.
      ValueError: a shape does not fit the cache, or `sliding_window` or `softcap` is not positive or
        the window not a whole number that is known under jit.
      Unsupported: there is no such kernel for this; the message says why.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> cache = rqjax.strategy("eden", jax.random.key(0), dim=64).cache(1, 2, 512)
      >>> cache = rqjax.append(cache, jnp.ones((1, 300, 2, 64)), jnp.ones((1, 300, 2, 64)))
      >>> rqjax.attend(cache, jnp.ones((1, 1, 8, 64))).shape  # four query heads share a head of keys
      (1, 1, 8, 64)
    """
    slots = checked_slots(cache, slots)
    cache, q = cache.of(slots), jnp.asarray(as_array(q))
    batch, kv_heads, _, dim = cache.exact_keys.shape
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (batch, dim) or q.shape[2] % kv_heads or q.shape[2] == 0:
        raise ValueError(f"expected q of shape ({batch}, time, a multiple of {kv_heads}, {dim}), got {q.shape}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(f"expected q of a floating-point dtype, got {q.dtype}")
    if sliding_window is not None:
        sliding_window = check_int("sliding_window", sliding_window, 1, 2**30)
    if softcap is not None and not is_traced(softcap) and not softcap > 0:
        raise ValueError(f"expected softcap to be positive, got {softcap}")
    time, q_heads = q.shape[1:3]
    if kept := cache.sliding_window:
        if sliding_window is None or sliding_window > kept:
            raise ValueError(
                f"expected a sliding_window of at most the {kept} tokens that are kept, got {sliding_window}"
            )
        if new is None and time > UNIT:
            wanted = f"at most {UNIT} queries at once, or dot_product_attention"
            raise ValueError(f"expected {wanted}, where the cache keeps {kept} tokens of each, got {time}")
        if new is None and not is_traced(cache.lengths) and not cache.remembers(cache.lengths + 1 - time).all():
            raise ValueError(
                f"expected fewer than {time} queries: what the first would see was forgotten before `truncate`"
            )
    if 0 in (batch, time):
        return q[..., : cache.value_quantizer.dim]
    if mask is not None:
        shape = (batch, q_heads, time, cache.max_len)
        mask = jnp.asarray(mask)
        given, mask = mask.shape, mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        if mask.dtype != bool or not all(size in (1, full) for size, full in zip(mask.shape, shape, strict=False)):
            raise ValueError(f"expected a boolean mask broadcastable to {shape}, got {mask.dtype} {given}")
    if not is_traced(cache.overflow):
        cache.check()
    if sink_logits is not None:
        sink_logits = jnp.asarray(sink_logits)
        if sink_logits.shape != (q_heads,):
            raise ValueError(f"expected sink_logits of shape ({q_heads},), got {sink_logits.shape}")
        if not jnp.issubdtype(sink_logits.dtype, jnp.floating):
            raise TypeError(f"expected sink_logits of a floating-point dtype, got {sink_logits.dtype}")
    scale = 1 / math.sqrt(dim) if scale is None else scale
    options = {"scale": scale, "sliding_window": sliding_window, "softcap": softcap, "sink_logits": sink_logits}
    return _attend(cache, q, mask, new, implementation=implementation, **options)


def dot_product_attention(
    query: Tokens,
    key: Tokens,
    value: Tokens | None,
    cache: KVCache,
    *,
    valid: Any = None,
    slots: Any = None,
    **options: Any,
) -> tuple[Shaped[Array, "batch time q_heads value_dim"], KVCache]:
    """Causal attention with a cache, for models that call `jax.nn.dot_product_attention`: `append`, then `attend`.

    Tokens of one call see each other in full precision, however many they are, and earlier ones as `attend` does.

    Args:
      query, key, value: arrays of the new tokens, (batch, time, heads, head_dim); no value if it is a part of the key.
      cache: cache of the tokens before.
      valid, slots: as in `append`.
      **options: as in `attend`.

    Returns:
      The output of `attend`, 0 for a sequence of which no token is valid, and the cache with the new tokens.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> cache = rqjax.strategy("eden", jax.random.key(0), dim=64).cache(1, 2, 512)
      >>> x = jnp.ones((1, 300, 2, 64))
      >>> out, cache = rqjax.dot_product_attention(x, x, x, cache)
      >>> (out.shape, cache.lengths.tolist())
      ((1, 300, 2, 64), [300])
    """
    time, checked = np.shape(key)[1], checked_slots(cache, slots)
    before, cache = cache.of(checked), append(cache, key, value, valid=valid, slots=slots)
    own = cache.of(checked)
    if valid is not None:  # a sequence without tokens has no queries, and takes no time
        own = dataclasses.replace(own, lengths=jnp.where(jnp.asarray(valid) > 0, own.lengths, 0))
    seen = time <= (max(own.window, 1) if own.sliding_window is None else UNIT)
    return attend(own, query, new=None if seen else _new(before, own, key, value, valid), **options), cache


def _new(before: KVCache, cache: KVCache, k: Tokens, v: Tokens | None, valid: Any) -> New:
    """Returns the tokens that have been appended last as the cache would hold them in full precision, after those that
    it has forgotten since."""
    k = jnp.asarray(as_array(k))
    time = k.shape[1]
    count = jnp.where(cache.overflow, 0, time if valid is None else jnp.asarray(valid))
    first, places = cache.lengths - count, cache.lengths[:, None] - time + jnp.arange(time)
    k = cache.key_form.turned(k, places[:, :, None])
    v = k[..., -cache.value_quantizer.dim :] if v is None else jnp.asarray(as_array(v))
    k, v = (rounded_to(jnp.swapaxes(x, 1, 2), cache.exact_keys.dtype) for x in (k, v))
    places = jnp.where(places < first[:, None], -1, places)
    if cache.sliding_window:
        held = (before.exact_keys, k), (before.exact_values, v), (before.exact_tokens(), places)
        k, v, places = (jnp.concatenate(pair, axis=min(2, pair[0].ndim - 1)) for pair in held)
    return New(k, v, places, first)


@operation
def _attend(cache: KVCache, q: Array, mask: Array | None, new: New | None, **options: Any) -> Array:
    """`attend` in plain JAX, with the derivative of attention to decoded vectors.

    Queries are rounded where they meet codes, which has no derivative, and the loops have no known length.
    """
    arrays = {name: x for name, x in options.items() if isinstance(x, jax.Array)}

    def run(
        past: Past, cache: KVCache, q: Array, mask: Array | None, new: New | None, arrays: dict[str, Array]
    ) -> Array:
        one = functools.partial(attend_with, past=past, **{**options, **arrays})
        if cache.tables is None or cache.capacity == 0 or len(q) == 1 or platforms.on_gpu():
            return one(cache, q, mask, new)

        def of_sequence(b: Array) -> Array:
            here = mask if mask is None or len(mask) == 1 else mask[b][None]
            return one(cache.of(b[None]), q[b][None], here, jax.tree.map(lambda x: x[b][None], new))[0]

        return lax.map(of_sequence, jnp.arange(len(q)))  # each takes its own time, not that of the longest

    attention = jax.custom_jvp(functools.partial(run, coded_sums))

    @attention.defjvp
    def derivative(primals: Any, tangents: Any) -> tuple[Array, Array]:
        def decoded(cache: KVCache, *others: Any) -> Array:
            names = ("keys", "values", "key_form", "key_quantizer", "own_value_quantizer")
            fixed = {name: getattr(cache, name) for name in names}
            exact = {
                name: jnp.nan_to_num(getattr(cache, name), posinf=0, neginf=0)
                for name in ("exact_keys", "exact_values")
            }
            return run(float_sums, dataclasses.replace(cache, **lax.stop_gradient(fixed), **exact), *others)

        return attention(*primals), jax.jvp(decoded, primals, tangents)[1]

    return attention(cache, q, mask, new, arrays)


attend.kernel = _attend.kernel  # pyright: ignore[reportFunctionMemberAccess]


def attend_with(
    cache: KVCache,
    q: Array,
    mask: Array | None,
    new: New | None,
    *,
    scale: Number,
    sliding_window: int | None,
    softcap: Number | None,
    sink_logits: Float[Array, "q_heads"] | None = None,
    past: Past = coded_sums,
    kernel: Past | None = None,
    weigh_exact: Callable[..., Array] | None = None,
) -> Array:
    """`attend` with checked arguments, the queries of a few tokens at a time.

    Args:
      new: tokens of this call, if they are to be seen in full precision whatever the cache has of them.
      past: sums over the tokens in codes.
      kernel: a backend's `past` for queries that all see the same codes.
      weigh_exact: a backend's attention to the tokens in full precision, called with scaled queries, keys, values and
        the mask of what is seen.
    """
    batch, time, q_heads, _ = q.shape
    positions = cache.lengths[:, None] - time + jnp.arange(time)
    q = cache.key_form.turned(q, positions[:, :, None])
    keys, values, tokens = cache.exact_keys, cache.newest_values(), cache.exact_tokens()
    if new is not None and cache.sliding_window:
        keys, values, tokens = new[:3]
    elif new is not None:
        tokens = jnp.where(tokens < new.first[:, None], tokens, -1)
        exact = (keys, new.keys), (values, new.values), (tokens, new.tokens)
        keys, values, tokens = (jnp.concatenate(pair, axis=min(2, pair[0].ndim - 1)) for pair in exact)

    size = max(1, QUERY_ROWS * cache.exact_keys.shape[1] // q_heads)
    if platforms.on_gpu():
        size = max(size, GPU_BLOCK_BYTES // (4 * q_heads * tokens.size))

    def at(q: Array, positions: Array, mask: Array | None) -> Array:
        queries = Queries.of(cache, q, positions, mask, scale, sliding_window, softcap)
        if new is not None:
            queries = queries._replace(first_new=new.first[:, None, None, None])
        sums = _exact_sums(queries, keys, values, tokens, weigh_exact)
        if cache.capacity:
            sums = merged(sums, past(cache, queries) if kernel is None else _kernel_sums(cache, queries, kernel, past))
        if sink_logits is not None:
            logits = jnp.repeat(sink_logits, queries.time)
            sums = with_sinks(sums, logits.reshape(queries.y.shape[1], -1))
        out = sums.values / jnp.where(sums.total > 0, sums.total, 1)[..., None]
        out = out.reshape(*out.shape[:2], -1, queries.time, out.shape[-1]).transpose(0, 3, 1, 2, 4)
        return out.reshape(*q.shape[:3], -1).astype(q.dtype)

    if time <= size:
        return at(q, positions, mask)
    fill = -time % size
    q, positions = padded(q, fill), padded(positions, fill)
    mask = padded(mask, fill, axis=2) if mask is not None and mask.shape[2] == time else mask

    def block(start: Array) -> Array:
        part = mask if mask is None or mask.shape[2] == 1 else lax.dynamic_slice_in_dim(mask, start, size, 2)
        some, where = (lax.dynamic_slice_in_dim(x, start, size, 1) for x in (q, positions))
        return at(some, where, part)

    blocks = lax.map(block, jnp.arange(0, time, size))
    return jnp.moveaxis(blocks, 0, 1).reshape(batch, time + fill, q_heads, -1)[:, :time]


def _exact_sums(
    queries: Queries,
    keys: Float[Array, "b h t d"],
    values: Float[Array, "b h t value_dim"],
    tokens: Int[Array, "b t"],
    weigh_exact: Callable[..., Array] | None,
) -> Sums:
    """Sums over the tokens in full precision; `tokens` are their places, -1 for none."""
    seen = queries.sees(tokens[:, None, None])

    def weigh(w: Float[Array, "b h r t"]) -> Float[Array, "b h r d"]:
        if queries.softcap is not None or weigh_exact is None:
            return weighted_sums(w, values)
        total = w.sum(-1, keepdims=True)
        return jnp.where(total > 0, total * weigh_exact(queries.y, keys, values, seen), 0)

    return queries.sums(full_precision_einsum("bhrd,bhtd->bhrt", queries.y, keys), seen, weigh)


def _kernel_sums(cache: KVCache, queries: Queries, kernel: Past, past: Past) -> Sums:
    """Sums over the tokens in codes by a kernel where all queries of a sequence see the same codes, else by `past`."""
    if queries.time == 1:
        return kernel(cache, queries)
    _, stop = queries.coded(cache)
    fused, plain = (functools.partial(sums, cache, queries) for sums in (kernel, past))
    return lax.cond((stop == stop[:, :, :1]).all(), fused, plain)
