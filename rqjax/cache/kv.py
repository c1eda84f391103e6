"""The compressed key-value cache: codes of the past, full precision for the newest and the first tokens."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, check_int, is_traced, nbytes, operation, pytree, static
from rqjax.scoring import rules, tiles

GROWTH = 256
"""Tokens by which `grow` rounds up (TurboQuant MLX, "Pre-allocation")."""
DOMINANT = 0.75
"""Share of the energy of a head's first keys that their mean must have to be subtracted from all keys.

Below it the mean of keys with rotary positions is a local one: it turns away, and subtracting it would add energy."""

Tokens: TypeAlias = Shaped[Array | np.ndarray, "..."]
"""Of the tokens of every sequence, (batch, time, heads, head_dim) as in `jax.nn.dot_product_attention`."""


@pytree
class KVCache:
    """Keys and values of a batch of sequences, of each its own length. `KVCache.init` makes an empty one.

    The first `sinks` and the newest `window` tokens or a few more are held in full precision, the others as codes.
    Codes are made of `tiles.UNIT` tokens at a time and depend on the tokens alone, not on how they were appended.
    """

    keys: Codes
    """Codes in the layout of `tiles`."""
    values: Codes
    exact_keys: Float[Array, "batch heads slots dim"]
    """The sinks, then a ring of the newest tokens: token t is in slot sinks + (t - sinks) mod (slots - sinks)."""
    exact_values: Float[Array, "batch heads slots dim"]
    key_mean: Float[Array, "batch heads dim"] | None
    """What is subtracted from keys before they are encoded, if the cache is `centered`: the mean of the first keys
    after the sinks where it is `DOMINANT`, else 0. It moves all scores of a query alike, which softmax ignores."""
    lengths: Int[Array, "batch"]
    """Tokens of each sequence."""
    overflow: Bool[Array, "batch"]
    """Sequences that an `append` under jit would have taken past `max_len`; it left them as they were."""
    key_quantizer: Quantizer
    own_value_quantizer: Quantizer | None
    """The values' quantizer, None if it is the keys'."""
    max_len: int = static()
    window: int = static()
    sinks: int = static()

    @classmethod
    def init(
        cls,
        batch: int,
        kv_heads: int,
        max_len: int,
        key_quantizer: Quantizer,
        value_quantizer: Quantizer,
        *,
        window: int = 128,
        sinks: int = 4,
        centered: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> "KVCache":
        """An empty cache.

        Args:
          batch: sequences.
          kv_heads: heads of keys and values.
          max_len: tokens that each sequence has room for; `grow` makes more.
          key_quantizer: quantizer of the keys; its `dim` is the head dimension. `Exact` stores full precision.
          value_quantizer: quantizer of the values; the same object as `key_quantizer` is stored once. The cache has its
            own copy of both, which is donated with it.
          window: newest tokens in full precision, at least.
          sinks: first tokens in full precision.
          centered: whether a mean key that dominates a sequence and head is subtracted before encoding.
          dtype: of tokens in full precision.
        """
        batch, kv_heads = check_int("batch", batch, 1, 2**20), check_int("kv_heads", kv_heads, 1, 2**20)
        max_len, window = check_int("max_len", max_len, 1, 2**30), check_int("window", window, 0, 2**20)
        sinks, dim = check_int("sinks", sinks, 0, 2**20), key_quantizer.dim
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise TypeError(f"expected dtype to be a floating-point dtype, got {jnp.dtype(dtype)}")
        if value_quantizer.dim != dim:
            raise ValueError(f"expected a value_quantizer of dimension {dim} like the keys', got {value_quantizer.dim}")
        capacity = _capacity(max_len, window, sinks)

        def empty(quantizer, transposed):
            unit = jax.ShapeDtypeStruct((batch, kv_heads, tiles.UNIT, dim), jnp.float32)
            encode = lambda x: rules.lay_out(quantizer, quantizer.encode(x), transposed)  # noqa: E731
            return _over(lambda leaf: leaf.empty(capacity), jax.eval_shape(encode, unit))

        exact = jnp.zeros((batch, kv_heads, sinks + window + tiles.UNIT, dim), dtype)
        return cls(
            keys=empty(key_quantizer, False),
            values=empty(value_quantizer, True),
            exact_keys=exact,
            exact_values=jnp.zeros_like(exact),
            key_mean=jnp.zeros((batch, kv_heads, dim)) if centered else None,
            lengths=jnp.zeros(batch, jnp.int32),
            overflow=jnp.zeros(batch, bool),
            key_quantizer=jax.tree.map(jnp.array, key_quantizer),
            own_value_quantizer=None if value_quantizer is key_quantizer else jax.tree.map(jnp.array, value_quantizer),
            max_len=max_len,
            window=window,
            sinks=sinks,
        )

    @property
    def value_quantizer(self) -> Quantizer:
        return self.key_quantizer if self.own_value_quantizer is None else self.own_value_quantizer

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: codes, norms, tokens in full precision, lengths, quantizers."""
        return nbytes(self)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for in codes."""
        return _capacity(self.max_len, self.window, self.sinks)

    @property
    def coded(self) -> Int[Array, "batch"]:
        """Tokens of each sequence that are in codes: those from `sinks` on."""
        return self.coded_at(self.lengths)

    def coded_at(self, lengths: Int[Array, "batch"]) -> Int[Array, "batch"]:
        """Tokens in codes of sequences of these lengths."""
        return jnp.maximum(lengths - self.sinks - self.window, 0) // tiles.UNIT * tiles.UNIT

    @property
    def ring(self) -> int:
        """Slots of the newest tokens in full precision."""
        return self.exact_keys.shape[2] - self.sinks

    def slot(self, t: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The slot of token t in the exact arrays."""
        return jnp.where(t < self.sinks, t, self.sinks + (t - self.sinks) % self.ring)

    def exact_tokens(self) -> Int[Array, "batch slots"]:
        """The token that each slot holds and no code does; -1 where there is none."""
        slots, lengths = jnp.arange(self.sinks + self.ring), self.lengths[:, None]
        newest = slots + (lengths - 1 - slots) // self.ring * self.ring
        ring = jnp.where((newest >= self.sinks + self.coded[:, None]) & (newest >= slots), newest, -1)
        return jnp.where(slots < self.sinks, jnp.where(slots < lengths, slots, -1), ring)

    def check(self) -> None:
        """Raises a ValueError if an `append` under jit went past `max_len`."""
        with jax.ensure_compile_time_eval():  # under jit too, of a cache that is a constant there
            full = bool(self.overflow.any())
        if full:
            which = np.flatnonzero(np.asarray(self.overflow)).tolist()
            raise ValueError(
                f"sequences {which} were appended to past max_len = {self.max_len}; they kept what they had"
            )


def append(cache: KVCache, k: Tokens, v: Tokens, *, valid: Int[Array | np.ndarray, "..."] | None = None) -> KVCache:
    """Appends keys and values of one token or of a chunk to every sequence.

    Under jit donate the cache (`jax.jit(rqjax.append, donate_argnums=0)`), so that it is written in place. There, where
    lengths are not known, a sequence for which there is no room is left as it was and marked in `overflow`.

    Args:
      cache: the cache.
      k: keys (batch, time, heads, head_dim) of any float dtype; stored in the cache's.
      v: values, as `k`.
      valid: how many tokens of each sequence count, the last ones (padding is on the left); all, if not given.

    Raises:
      TypeError: k or v is not of floating-point numbers.
      ValueError: their shapes do not fit the cache or each other, `valid` is out of range, or there is no room.
    """
    k, v = jnp.asarray(k), jnp.asarray(v)
    batch, heads, _, dim = cache.exact_keys.shape
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (batch, heads, dim):
            raise ValueError(f"expected {name} of shape ({batch}, time, {heads}, {dim}), got {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"expected {name} of a floating-point dtype, got {x.dtype}")
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"expected k and v of one shape and dtype, got {k.shape} {k.dtype} and {v.shape} {v.dtype}")
    time = k.shape[1]
    if time == 0:
        return cache
    count = jnp.full(batch, time, jnp.int32) if valid is None else jnp.asarray(valid).astype(jnp.int32)
    if count.shape != (batch,):
        raise ValueError(f"expected valid of shape ({batch},), got {count.shape}")
    _check_room(cache, count, time)
    k, v = (jnp.swapaxes(x, 1, 2).astype(cache.exact_keys.dtype) for x in (k, v))
    return _append(cache, k, v, count)


def grow(cache: KVCache, max_len: int) -> KVCache:
    """The cache with room for at least `max_len` tokens, rounded up to a multiple of 256; not under jit."""
    max_len = -(-check_int("max_len", max_len, cache.max_len, 2**30) // GROWTH) * GROWTH
    more = _capacity(max_len, cache.window, cache.sinks) - cache.capacity
    keys, values = (_over(lambda leaf: leaf.extend(more), codes) for codes in (cache.keys, cache.values))
    return dataclasses.replace(cache, keys=keys, values=values, max_len=max_len)


@operation
def _append(cache: KVCache, k: Array, v: Array, count: Int[Array, "batch"]) -> KVCache:
    time = k.shape[2]
    fits = (count >= 0) & (count <= time) & (cache.lengths + count <= cache.max_len)
    count = jnp.where(fits, count, 0)
    lengths = cache.lengths + count
    before, after = cache.coded, cache.coded_at(lengths)

    def tokens(start, size):
        """`size` tokens from token `start` of each sequence on, as they will be stored: (batch, heads, size, dim)."""
        t = start[:, None] + jnp.arange(size)
        new = t - cache.lengths[:, None] + (time - count[:, None])

        def pick(exact, chunk):
            def one(exact, chunk, t, new, length):
                return jnp.where((t < length)[:, None], exact[:, cache.slot(t)], chunk[:, jnp.clip(new, 0, time - 1)])

            return jax.vmap(one)(exact, chunk, t, new, cache.lengths)

        return pick(cache.exact_keys, k), pick(cache.exact_values, v)

    mean = None if cache.key_mean is None else _mean(cache, cache.key_mean, before, after, tokens)

    def encode(i, stored):
        """Moves the i-th unit of each sequence that has one to codes."""
        start = before + i * tiles.UNIT
        key, value = tokens(cache.sinks + start, tiles.UNIT)
        key = as_float32(key) if mean is None else as_float32(key) - mean[:, :, None]
        units = (
            rules.lay_out(cache.key_quantizer, cache.key_quantizer.encode(key), False),
            rules.lay_out(cache.value_quantizer, cache.value_quantizer.encode(as_float32(value)), True),
        )
        return _over(lambda old, new: old.write(new, start, start < after), stored, units)

    keys, values = cache.keys, cache.values
    if cache.capacity:
        keys, values = lax.fori_loop(0, ((after - before) // tiles.UNIT).max(), encode, (keys, values))

    # Tokens that newer ones of the same chunk would overwrite, and padding, go nowhere.
    t = cache.lengths[:, None] + jnp.arange(time) - (time - count[:, None])
    stays = (t >= cache.lengths[:, None]) & ((t < cache.sinks) | (t >= lengths[:, None] - cache.ring))
    slots = jnp.where(stays, cache.slot(t), cache.sinks + cache.ring)
    put = jax.vmap(lambda exact, slots, chunk: exact.at[:, slots].set(chunk, mode="drop"))
    return dataclasses.replace(
        cache,
        keys=keys,
        values=values,
        exact_keys=put(cache.exact_keys, slots, k),
        exact_values=put(cache.exact_values, slots, v),
        key_mean=mean,
        lengths=lengths,
        overflow=cache.overflow | ~fits,
    )


def _mean(cache: KVCache, mean: Array, before: Array, after: Array, tokens: Callable) -> Array:
    """The mean key of each sequence and head, taken when the first tokens of a sequence become codes."""
    begins = (before == 0) & (after > 0)

    def fresh() -> Array:
        keys = as_float32(tokens(jnp.full_like(before, cache.sinks), cache.window + tiles.UNIT)[0])
        first = keys.mean(axis=2)
        share = jnp.sum(first**2, axis=-1) / jnp.maximum(jnp.sum(keys**2, axis=-1).mean(axis=2), 1e-30)
        first = jnp.where((share > DOMINANT)[..., None], first, 0)
        return jnp.where(begins[:, None, None], first, mean)

    return lax.cond(begins.any(), fresh, lambda: mean)


def _check_room(cache: KVCache, count: Array, time: int) -> None:
    """Raises where the numbers are known, that is outside jit."""
    if time > cache.max_len:
        raise ValueError(f"expected at most max_len = {cache.max_len} tokens, got k of {time}")
    if is_traced(count) or is_traced(cache.lengths):
        return
    cache.check()
    counts, lengths = np.asarray(count), np.asarray(cache.lengths)
    if (counts < 0).any() or (counts > time).any():
        raise ValueError(f"expected valid to be from 0 to {time}, the tokens of k, got {counts.tolist()}")
    if (lengths + counts > cache.max_len).any():
        raise ValueError(f"no room: lengths {lengths.tolist()} and {time} more tokens exceed max_len = {cache.max_len}")


def _capacity(max_len: int, window: int, sinks: int) -> int:
    coded = max(0, max_len - sinks - window) // tiles.UNIT * tiles.UNIT
    return -(-coded // tiles.CAPACITY_STEP) * tiles.CAPACITY_STEP


def _over(function: Callable[..., tiles.TokenArray], *codes: Codes) -> Codes:
    return jax.tree.map(function, *codes, is_leaf=tiles.is_token_array)
