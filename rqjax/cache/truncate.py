"""A cache as it was some tokens ago: a draft is dropped, or a conversation goes on from an earlier turn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from rqjax.arrays.planes import put
from rqjax.cache.append import checked_slots
from rqjax.cache.coded import decoded_page
from rqjax.cache.kv import KVCache, over
from rqjax.core import PAGE, check_ints, is_traced, operation
from rqjax.core.products import rounded_to


def truncate(
    cache: KVCache,
    lengths: Shaped[Array | np.ndarray, "..."],
    *,
    slots: Shaped[Array | np.ndarray, "..."] | None = None,
) -> KVCache:
    """Returns the cache without the newest tokens of each sequence.

    Codes stay codes: after the cut fewer than `window` tokens of a sequence are in full precision, until new ones are
    appended. Codes are of whole units. If a unit is cut, its remaining tokens return to full precision as decoded from
    their codes. Nothing is decoded where no more than the window is dropped.

    Args:
      cache: the cache; under jit donate it.
      lengths: tokens that each sequence keeps, the first ones; at most those that it has. A cache with a
        `sliding_window` has forgotten what shorter sequences would see: it drops up to 15 tokens, or all.
      slots: as in `append`.

    Raises:
      ValueError: lengths are not whole numbers, one a sequence, from 0 to those of the cache; slots are wrong; or what
        the tokens before them would see is forgotten. Under jit such a sequence stays as it is, marked in `overflow`.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> cache = rqjax.strategy("eden", jax.random.key(0), dim=64).cache(1, 2, 512)
      >>> cache = rqjax.append(cache, jnp.ones((1, 300, 2, 64)), jnp.ones((1, 300, 2, 64)))
      >>> rqjax.truncate(cache, jnp.array([296])).lengths.tolist()
      [296]
    """
    slots = checked_slots(cache, slots)
    some = cache.lengths if slots is None else cache.lengths[slots]
    lengths = check_ints("lengths", lengths, some, some.shape)
    if cache.sliding_window and not is_traced(lengths) and not is_traced(cache.lengths):
        whole = cache.of(slots).remembers(jnp.asarray(lengths))
        if not whole.all():
            held = f"the {cache.sliding_window} tokens before each end"
            raise ValueError(f"expected lengths for which {held} are not forgotten, got {np.asarray(lengths).tolist()}")
    return _truncate(cache, jnp.asarray(lengths), slots)


@operation
def _truncate(cache: KVCache, lengths: Int[Array, "some"], slots: Int[Array, "some"] | None) -> KVCache:
    whole, cache = cache, cache.of(slots)
    whole_window = cache.remembers(lengths)
    lengths = jnp.where(whole_window, jnp.clip(lengths, 0, cache.lengths), cache.lengths)
    held = jnp.minimum(cache.coded, jnp.maximum(lengths - cache.sinks, 0) // cache.unit * cache.unit)
    keys, values = cache.exact_keys, cache.exact_values
    if cache.capacity:
        t = cache.sinks + held[:, None] + jnp.arange(cache.unit)
        back = t < jnp.minimum(cache.sinks + cache.coded, lengths)[:, None]
        places = jnp.where(back, cache.slot(t), cache.sinks + cache.ring)

        def restored() -> tuple[Array, Array]:
            stored = jax.vmap(lambda exact, places, x: put(exact, (slice(None), places), rounded_to(x, exact.dtype)))
            return tuple(map(stored, (keys, values), (places, places), _units(cache, held)))  # pyright: ignore

        keys, values = lax.cond(back.any(), restored, lambda: (keys, values))
    overflow = cache.overflow | ~whole_window
    cut = {"lengths": lengths, "held": held, "exact_keys": keys, "exact_values": values, "overflow": overflow}
    return whole.with_sequences(slots, dataclasses.replace(cache, **cut))


def _units(cache: KVCache, start: Int[Array, "batch"]) -> tuple[Float[Array, "batch h unit _"], ...]:
    """Decodes keys and values of a unit from token `start` of each sequence on."""

    def of_sequence(b: Array) -> tuple[Array, ...]:
        one, first = cache.of(b[None]), start[b] // PAGE * PAGE
        if one.tables is None:
            keys, values = over(lambda x: x.row(b), (one.keys, one.values))
            one = dataclasses.replace(one, keys=keys, values=values)
        keys, values = decoded_page(one, first)
        found = keys[0], values[0, ..., : cache.exact_values.shape[-1]]  # none are stored if they are in the keys
        return tuple(lax.dynamic_slice_in_dim(x, start[b] - first, cache.unit, 1) for x in found)

    return lax.map(of_sequence, jnp.arange(len(start)))
