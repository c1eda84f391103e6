"""Appending to a cache: tokens enter its ring in full precision, the oldest of the ring become codes; and room for
more."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from rqjax.arrays.planes import as_float32, put
from rqjax.cache.kv import GROWTH, KVCache, Tokens, over
from rqjax.core import PAGE, Codes, as_array, check_int, check_ints, is_traced, operation, platforms
from rqjax.core.products import rounded_to
from rqjax.core.pytree import with_derived
from rqjax.quantizers.across_heads import GivenKeys

PIECE_BYTES = 2**28
"""Bytes of keys and values in float32 that a GPU encodes at once."""


def append(
    cache: KVCache,
    k: Tokens,
    v: Tokens | None = None,
    *,
    valid: Shaped[Array | np.ndarray, "..."] | None = None,
    slots: Shaped[Array | np.ndarray, "..."] | None = None,
) -> KVCache:
    """Appends keys and values of one token or of a chunk to every sequence.

    Under jit donate the cache (`jax.jit(rqjax.append, donate_argnums=0)`), so that it is written in place. Lengths are
    not known there: a sequence without room is left as it was and marked in `overflow`.

    Tokens in full precision pass gradients on to k and v. Those in codes have none: rounding is constant nearly
    everywhere.

    Args:
      cache: the cache.
      k: keys (batch, time, heads, head_dim) of any float dtype; stored in the cache's.
      v: values, as `k`; none if they are the last coordinates of the keys (`LastPart`).
      valid: how many tokens of each sequence count, the last ones (padding is on the left); all, if not given.
      slots: the sequences of a cache with pages that these are, each once; all, if not given.

    Raises:
      TypeError: k or v is not of floating-point numbers, or the cache is no KVCache.
      ValueError: their shapes do not fit the cache or each other, `valid` or `slots` is out of range, or there is no
        room, or in a cache with pages no page for it.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> cache = rqjax.strategy("eden", jax.random.key(0), dim=64).cache(2, 2, 512)
      >>> x = jnp.ones((2, 300, 2, 64))
      >>> rqjax.append(cache, x, x, valid=jnp.array([300, 100])).lengths.tolist()
      [300, 100]
    """
    slots = checked_slots(cache, slots)
    if (v is None) != cache.values_in_keys:
        raise ValueError("expected v, got None" if v is None else "values are parts of the keys: expected v=None")
    k = jnp.asarray(as_array(k))
    v = k if v is None else jnp.asarray(as_array(v))
    heads, _, dim = cache.exact_keys.shape[1:]
    batch = len(cache.lengths if slots is None else slots)
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads, dim):
            raise ValueError(f"expected {name} of shape ({batch}, time, {heads}, {dim}), got {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"expected {name} of a floating-point dtype, got {x.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"expected k and v of one shape, got {k.shape} and {v.shape}")
    time = k.shape[1]
    if time == 0 or batch == 0:
        return cache
    if valid is None and time > cache.max_len:
        raise ValueError(f"expected at most max_len = {cache.max_len} tokens, got k of {time}")
    count = jnp.full(batch, time, jnp.int32) if valid is None else checked_valid(valid, batch, time)
    _check_room(cache.of(slots), count, time)
    return _append(cache, k, v[..., :0] if cache.values_in_keys else v, count, slots)


def checked_valid(valid: Any, batch: int, time: int) -> Int[Array, "batch"]:
    """Checks how many of the last tokens of each sequence count."""
    return jnp.asarray(check_ints("valid", valid, time, (batch,)))


def checked_slots(cache: KVCache, slots: Shaped[Array | np.ndarray, "..."] | None) -> Int[Array, "some"] | None:
    """Checks the slots of a cache's sequences; None stands for all of them."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"expected cache to be a KVCache, got {type(cache).__name__}")
    if slots is None:
        return None
    if cache.tables is None:
        raise ValueError("slots are of a cache with pages: expected one of KVCache.init(..., pages=)")
    slots, traced = check_ints("slots", slots, len(cache.lengths) - 1, (np.size(slots),)), is_traced(slots)
    if not traced and len(set(slots.tolist())) < len(slots):
        raise ValueError(f"expected slots that differ, got {slots.tolist()}")
    return jnp.asarray(slots)


def grow(cache: KVCache, max_len: int) -> KVCache:
    """Returns the cache with room for at least `max_len` tokens, rounded up to a multiple of 256; not under jit.

    Sequences that `overflow` marks are as they were before the tokens that they had no room for: no mark is left.

    Raises:
      ValueError: `max_len` is less than the cache's, or its codes lie in pages.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> cache = rqjax.strategy("eden", jax.random.key(0), dim=64).cache(1, 2, 300)
      >>> rqjax.grow(cache, 600).max_len
      768
    """
    if cache.tables is not None:
        raise ValueError("a cache with pages does not grow")
    max_len = -(-check_int("max_len", max_len, cache.max_len, 2**30) // GROWTH) * GROWTH
    grown = dataclasses.replace(cache, max_len=max_len)
    more = grown.capacity - cache.capacity
    keys, values = (over(lambda leaf: leaf.extend(more), codes) for codes in (cache.keys, cache.values))
    none = jnp.zeros_like(cache.overflow)
    return with_derived(dataclasses.replace(grown, keys=keys, values=values, overflow=none))


@operation
def _append(cache: KVCache, k: Array, v: Array, count: Int[Array, "some"], slots: Int[Array, "some"] | None) -> KVCache:
    whole, cache, time = cache, cache.of(slots), k.shape[1]
    fits = (count >= 0) & (count <= time) & has_room(cache, cache.lengths + count)
    count = jnp.where(fits, count, 0)
    lengths = cache.lengths + count
    if platforms.on_gpu():  # if what follows were of the old lengths, XLA would copy them before it overwrites them
        lengths, count = lax.optimization_barrier((lengths, count))
    first = lengths - count
    before, after = (jnp.maximum(cache.held, cache.coded_at(n)) for n in (first, lengths))
    t = first[:, None] + jnp.arange(time) - (time - count[:, None])
    k = cache.key_form.turned(k, t[:, :, None])
    k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))

    # XLA copies a ring that is read and then written, unless a barrier orders them. With one token, the ring that has
    # been written still has all that becomes codes.
    exact = cache.exact_keys, cache.exact_values
    stored = functools.partial(entered, k=k, v=v, lengths=lengths, count=count)
    exact, ahead = stored(cache) if time == 1 else (exact, exact)
    # Codes have no derivative, and a loop of unknown length would refuse one.
    new = tuple(rounded_to(x, cache.exact_keys.dtype) for x in (k, v))
    past, rings, new, ahead = lax.stop_gradient((cache, exact, new, ahead))
    loops = not platforms.on_gpu() or _loops(past)

    def tokens(start, size):
        """`size` tokens from token `start` of each sequence on, as they are stored: twice (batch, heads, size, dim)."""
        if time == 1 and not loops:
            return ahead
        t = start[:, None] + jnp.arange(size)
        of_ring = tuple(past.picked(ring, t) for ring in rings)
        if time == 1:
            return of_ring
        chunk, is_new = t - first[:, None] + (time - count[:, None]), (t >= first[:, None])[:, None, :, None]
        of_chunk = jax.vmap(lambda x, at: x[:, jnp.clip(at, 0, time - 1)])
        return tuple(jnp.where(is_new, of_chunk(x, chunk), old) for old, x in zip(of_ring, new, strict=True))

    form = past.key_form
    if form.learned:  # when the first tokens of a sequence become codes
        begins, size = (before == 0) & (after > 0), past.window + past.unit

        def learn():
            own = slice(past.sinks, past.sinks + size)  # where the ring has them
            first = rings[0][:, :, own] if time == 1 else tokens(jnp.full_like(before, past.sinks), size)[0]
            mean = past.key_form.learn(as_float32(first), past.sinks + jnp.arange(size))
            return jnp.where(begins[:, None, None], mean, past.key_form.mean)

        mean = learn() if platforms.on_gpu() else lax.cond(begins.any(), learn, lambda: past.key_form.mean)
        form = form.changed(mean=mean)

    def encode(i, stored, units=1):
        """Moves `units` units of each sequence, from the i-th such piece on, to codes; fewer where there are fewer."""
        start, size = before + i * units * past.unit, units * past.unit
        active = start[:, None] + past.unit * jnp.arange(units) < after[:, None]
        key, value = map(as_float32, tokens(past.sinks + start, size))
        key = form.encode_form(key, (past.sinks + start[:, None] + jnp.arange(size))[:, None])
        return over(lambda old, new: old.write(new, start, active, past.tables), stored, codes_of(past, key, value))

    codes = past.keys, past.values
    if past.capacity:
        most = -(-time // past.unit)
        if loops:
            codes = lax.fori_loop(0, ((after - before) // past.unit).max(), encode, codes)
        else:  # the most units that there can be, since the host would read how many there are
            units = max(1, min(most, PIECE_BYTES // (8 * k.size // time * past.unit)))
            piece, pieces = functools.partial(encode, units=units), -(-most // units)
            codes = piece(0, codes) if pieces == 1 else lax.fori_loop(0, pieces, piece, codes)
    if time > 1:
        if platforms.on_gpu():
            codes, exact = lax.optimization_barrier((codes, exact))
        exact, _ = stored(dataclasses.replace(cache, exact_keys=exact[0], exact_values=exact[1]))
    cache = dataclasses.replace(
        cache,
        keys=codes[0],
        values=codes[1],
        exact_keys=exact[0],
        exact_values=exact[1],
        key_form=form,
        lengths=lengths,
        overflow=cache.overflow | ~fits,
    )
    return whole.with_sequences(slots, cache)


@operation
def entered(
    cache: KVCache, k: Array, v: Array, lengths: Int[Array, "batch"], count: Int[Array, "batch"]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Writes new tokens, `count` of each sequence up to `lengths`, into the rings.

    Those that newer ones of the same call would overwrite, and padding, go nowhere.

    Returns:
      The keys and values in full precision, and those of the unit of each sequence that becomes codes next, twice
      (batch, heads, unit, dim): right where this completes one unit at most.
    """
    time = k.shape[2]
    t = lengths[:, None] - time + jnp.arange(time)
    stays = (t >= (lengths - count)[:, None]) & ((t < cache.sinks) | (t >= lengths[:, None] - cache.ring))
    places = jnp.where(stays, cache.slot(t), cache.sinks + cache.ring)
    one = jax.vmap(lambda ring, places, chunk: put(ring, (slice(None), places), chunk))
    k, v = (rounded_to(x, cache.exact_keys.dtype) for x in (k, v))
    keys, values = one(cache.exact_keys, places, k), one(cache.exact_values, places, v)
    first = cache.sinks + jnp.maximum(cache.held, cache.coded_at(lengths - count))
    t = first[:, None] + jnp.arange(cache.unit)
    return (keys, values), (cache.picked(keys, t), cache.picked(values, t))


def codes_of(
    cache: KVCache, key: Float[Array, "b h t d"], value: Float[Array, "b h t value_dim"]
) -> tuple[Codes, Codes]:
    """Encodes keys and values, laid out; at once if they have one quantizer."""
    keys, values = cache.key_quantizer, cache.value_quantizer
    if cache.values_in_keys:
        return keys.laid_out(keys.encode(key), True), cache.values
    if cache.own_value_quantizer is None:
        both = keys.encode(jnp.concatenate([key, value]))
        of_keys, of_values = (
            jax.tree.map(lambda x, part=part: x[part], both) for part in (slice(len(key)), slice(len(key), None))
        )
    else:
        of_keys = keys.encode(key)
        of_values = values.encode(values.left(value, of_keys) if isinstance(values, GivenKeys) else value)
    return keys.laid_out(of_keys, cache.weighs_keys), values.laid_out(of_values, True)


def _loops(cache: KVCache) -> bool:
    """Tells whether a quantizer encodes in loops, as trellis codes do. These launch thousands of kernels, so that a
    step that fills no unit should not run them."""
    _, heads, _, dim = cache.exact_keys.shape
    unit = [jax.ShapeDtypeStruct((1, heads, cache.unit, d), jnp.float32) for d in (dim, cache.exact_values.shape[3])]
    return _has_loop(jax.make_jaxpr(functools.partial(codes_of, cache))(*unit).jaxpr)


def _has_loop(jaxpr: Any) -> bool:
    """Tells whether there is a loop in a program outside of kernels."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "scan"):
            return True
        if equation.primitive.name not in ("pallas_call", "mpmd_map"):
            inner = [getattr(value, "jaxpr", value) for value in jax.tree.leaves([*equation.params.values()])]
            if any(hasattr(one, "eqns") and _has_loop(one) for one in inner):
                return True
    return False


def has_room(cache: KVCache, lengths: Int[Array, "batch"]) -> Bool[Array, "batch"]:
    """Returns whether sequences of these lengths have the room, and their pages."""
    fits = lengths <= cache.max_len
    return (
        fits
        if cache.tables is None or cache.sliding_window
        else fits & (cache.coded_at(lengths) <= PAGE * (cache.tables >= 0).sum(1))
    )


def _check_room(cache: KVCache, count: Array, time: int) -> None:
    """Raises a ValueError for missing room where lengths are known, that is outside jit."""
    if is_traced(count) or is_traced(cache.lengths):
        return
    cache.check()
    counts, lengths = np.asarray(count), np.asarray(cache.lengths)
    if not np.asarray(has_room(cache, cache.lengths + count)).all() and (lengths + counts <= cache.max_len).all():
        raise ValueError(f"no pages for {(lengths + counts).tolist()} tokens: reserve them before (PagedCache.reserve)")
    if (lengths + counts > cache.max_len).any():
        raise ValueError(f"no room: lengths {lengths.tolist()} and {time} more tokens exceed max_len = {cache.max_len}")
