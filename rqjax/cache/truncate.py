"""A cache as it was some tokens ago: a draft is dropped, or a conversation goes on from an earlier turn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from rqjax.arrays.planes import put
from rqjax.cache.append import checked_slots
from rqjax.cache.kv import KVCache, over
from rqjax.cache.scores import scorer
from rqjax.core import check_ints, operation
from rqjax.scoring import rules, tiles


def truncate(
    cache: KVCache,
    lengths: Shaped[Array | np.ndarray, "..."],
    *,
    slots: Shaped[Array | np.ndarray, "..."] | None = None,
) -> KVCache:
    """The cache without the newest tokens of each sequence.

    What was coded stays coded: after the cut fewer than `window` tokens of a sequence are in full precision, until new
    ones are appended. Codes are of whole units: of a unit that is cut the tokens that stay return to full precision, as
    what their codes decode to. Nothing is decoded where no more than the window is dropped.

    Args:
      cache: the cache; under jit donate it.
      lengths: tokens that each sequence keeps, the first ones; at most those that it has.
      slots: as in `append`.

    Raises:
      ValueError: lengths are not whole numbers, one a sequence, from 0 to those of the cache; or slots are wrong.

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
    return _truncate(cache, jnp.asarray(lengths), slots)


@operation
def _truncate(cache: KVCache, lengths: Int[Array, "some"], slots: Int[Array, "some"] | None) -> KVCache:
    whole, cache = cache, cache.of(slots)
    lengths = jnp.clip(lengths, 0, cache.lengths)
    held = jnp.minimum(cache.coded, jnp.maximum(lengths - cache.sinks, 0) // cache.unit * cache.unit)
    keys, values = cache.exact_keys, cache.exact_values
    if cache.capacity:
        t = cache.sinks + held[:, None] + jnp.arange(cache.unit)
        back = t < jnp.minimum(cache.sinks + cache.coded, lengths)[:, None]
        places = jnp.where(back, cache.slot(t), cache.sinks + cache.ring)

        def restored() -> tuple[Array, Array]:
            stored = jax.vmap(lambda exact, places, x: put(exact, (slice(None), places), x.astype(exact.dtype)))
            return tuple(map(stored, (keys, values), (places, places), _units(cache, held)))  # pyright: ignore

        keys, values = lax.cond(back.any(), restored, lambda: (keys, values))
    cut = {"lengths": lengths, "held": held, "exact_keys": keys, "exact_values": values}
    return whole.with_sequences(slots, dataclasses.replace(cache, **cut))


def _units(cache: KVCache, start: Int[Array, "batch"]) -> tuple[Float[Array, "batch h unit d"], ...]:
    """Keys and values that the codes of a unit decode to, from token `start` of each sequence on."""
    heads, dim = cache.exact_keys.shape[1::2]
    eye = lambda n: jnp.broadcast_to(jnp.eye(n), (1, heads, n, n))  # noqa: E731

    def of_sequence(b: Array) -> tuple[Array, Array]:
        one = cache.of(b[None])
        first = start[b] // tiles.PAGE * tiles.PAGE  # all of a page are decoded: the layout is read by pages

        def read(codes):
            def leaf(x):
                if one.tables is None:
                    x = dataclasses.replace(x, bits=lax.dynamic_slice_in_dim(x.bits, b, 1))
                return x.read(first, tiles.PAGE, one.tables)

            return over(leaf, codes)

        keys = scorer(one, eye(dim))(read(cache.keys), cache.sinks + first)  # of unit vectors: the coordinates
        keys = jnp.swapaxes(keys, 2, 3)
        if cache.latent:
            values = keys[..., :0]
        else:
            weights = rules.weigh(cache.value_quantizer, eye(tiles.PAGE), read(cache.values))
            values = rules.restore(cache.value_quantizer, weights)
        found = keys[0], values[0]
        return tuple(lax.dynamic_slice_in_dim(x, start[b] - first, cache.unit, 1) for x in found)  # pyright: ignore

    return lax.map(of_sequence, jnp.arange(len(start)))
