"""Re-encoding of a cache by other quantizers, as with fewer bits where memory runs short."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from rqjax.cache.append import codes_of
from rqjax.cache.coded import decoded
from rqjax.cache.kv import KVCache, LastPart, over, together
from rqjax.cache.strategy import Strategy
from rqjax.core import PAGE, Codes, TokenArray, operation
from rqjax.core.pytree import with_derived


def requantize(cache: KVCache, strategy: Strategy, *, pages: int | None = None) -> KVCache:
    """Returns the cache with the quantizers of another strategy. Tokens in full precision stay so. Codes are decoded
    and encoded again, a page at a time, so that the errors of both add up. A cache with a `sliding_window` has none and
    is returned as it is.

    Args:
      cache: the cache.
      strategy: encodes as many tokens together as the cache, and keys before their rotation if the cache does.
      pages: new number of pages of a cache with pages, no fewer than before; unchanged if not given.

    Raises:
      ValueError: the strategy does not fit the cache, or there are to be fewer pages.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> cache = rqjax.strategy("eden_4", jax.random.key(0), dim=64).cache(1, 2, 512)
      >>> cache = rqjax.append(cache, jnp.ones((1, 300, 2, 64)), jnp.ones((1, 300, 2, 64)))
      >>> smaller = rqjax.requantize(cache, rqjax.strategy("eden_2", jax.random.key(1), dim=64))
      >>> (smaller.nbytes < 0.9 * cache.nbytes, smaller.lengths.tolist())
      (True, [300])
    """
    if cache.sliding_window:
        return cache
    unit, dim = together(strategy.keys, strategy.values), strategy.keys.dim
    if (unit, dim) != (cache.unit, cache.key_quantizer.dim):
        wanted = f"{cache.unit} tokens of {cache.key_quantizer.dim} dimensions"
        raise ValueError(f"expected a strategy of {wanted}, got {unit} of {dim}")
    if cache.key_form.turns_late != strategy.key_form.turns_late:
        raise ValueError(f"expected a strategy for keys {cache.key_form}, got {strategy.key_form}")
    if cache.values_in_keys != isinstance(strategy.values, LastPart):
        got, wanted = ("values", "LastPart()") if cache.values_in_keys else ("LastPart()", "values")
        raise ValueError(f"expected a strategy with {wanted} as this cache, got {got}")
    if cache.values_in_keys and (last := strategy.keys.parts[-1].dim) != cache.value_quantizer.dim:  # pyright: ignore
        raise ValueError(f"expected values of {cache.value_quantizer.dim} dimensions, got {last}")
    rooms = jax.tree.leaves(cache.keys)[0].shape[0]
    if pages is not None and (cache.tables is None or pages < rooms):
        raise ValueError(f"expected pages of a cache with at most as many, got {pages} for {rooms}")
    more = 0 if pages is None else pages - rooms
    pair = (strategy.keys, None if strategy.values is strategy.keys else strategy.values)
    keys, values = jax.tree.map(jnp.array, pair)
    new = dataclasses.replace(cache, key_quantizer=keys, own_value_quantizer=values)
    of_keys, of_values = _recoded(cache, new) if cache.capacity else _nothing(new, rooms)
    return with_derived(dataclasses.replace(new, keys=_padded(of_keys, more), values=_padded(of_values, more)))


def _nothing(cache: KVCache, rooms: int) -> tuple[Codes, Codes]:
    """Returns the codes of a cache that has no room for any."""
    _, heads, _, dim = cache.exact_keys.shape
    some = [
        jax.ShapeDtypeStruct((rooms, heads, cache.unit, d), jnp.float32) for d in (dim, cache.exact_values.shape[3])
    ]
    codes = jax.eval_shape(functools.partial(codes_of, cache), *some)
    return over(lambda leaf: leaf.empty(0), codes)


def _padded(codes: Codes, rooms: int) -> Codes:
    def leaf(x: TokenArray) -> TokenArray:
        return dataclasses.replace(x, bits=jnp.pad(x.bits, [(0, rooms), *[(0, 0)] * (x.bits.ndim - 1)]))

    return over(leaf, codes)


@operation
def _recoded(old: KVCache, new: KVCache) -> tuple[Codes, Codes]:
    """Encodes what the codes of one cache decode to, as another one does."""
    codes = old.keys, old.values
    first = jax.tree.leaves(codes, is_leaf=TokenArray.is_one)[0]
    rooms, tokens = first.bits.shape[0], first.bits.shape[first.axis] * first.tokens_per_entry

    def page(room: Array, start: Array) -> tuple[Codes, Codes]:
        keys, values = over(lambda x: x.row(room).read(start, PAGE), codes)
        part = dataclasses.replace(old, keys=keys, values=values)
        key = decoded(old.key_quantizer, keys, old.weighs_keys)
        value = key[..., :0] if old.values_in_keys else decoded(old.value_quantizer, part.value_codes, True)
        return codes_of(new, key, value)

    def of_room(room: Array) -> tuple[Codes, Codes]:
        return lax.map(lambda start: page(room, start), PAGE * jnp.arange(tokens // PAGE))

    def joined(x: TokenArray) -> TokenArray:  # (rooms, pages, 1, ...) as (rooms, ...)
        bits = jnp.moveaxis(x.bits[:, :, 0], 1, x.axis)
        shape = [*bits.shape[: x.axis], -1, *bits.shape[x.axis + 2 :]]
        return dataclasses.replace(x, bits=bits.reshape(shape))

    return over(joined, lax.map(of_room, jnp.arange(rooms)))
