"""Queries of a call of attention, and the tokens that each sees."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from rqjax.arrays.planes import as_float32
from rqjax.cache.kv import KVCache
from rqjax.cache.sums import NEVER, Sums

Number: TypeAlias = float | int | Float[Array, ""]


class Queries(NamedTuple):
    """Queries of a call. A head of keys has as rows the queries that share it, one query head after another."""

    y: Float[Array, "b h r d"]
    """Scaled queries in float32, rotated to their positions if the cache has a rope."""
    positions: Int[Array, "b 1 r 1"]
    """Token of each query."""
    time: int
    """Number of tokens; rows / time query heads share a head of keys."""
    mask: Bool[Array, "#b #h #r tokens"] | None
    """Tokens that each query may see."""
    sliding_window: int | None
    softcap: Number | None
    first_new: Int[Array, "b 1 1 1"] | None = None
    """First token that no query sees in codes, as those of the same call; None: codes are seen up to the query."""

    @classmethod
    def of(
        cls,
        cache: KVCache,
        q: Float[Array, "b time q_heads d"],
        positions: Int[Array, "b time"],
        mask: Bool[Array, "#b #q_heads #time #max_len"] | None,
        scale: Number,
        sliding_window: int | None,
        softcap: Number | None,
    ) -> "Queries":
        """Makes the record of rotated queries at their positions."""
        batch, time, q_heads, dim = q.shape
        kv_heads = cache.exact_keys.shape[1]
        groups = q_heads // kv_heads
        y = as_float32(q).reshape(batch, time, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4) * scale
        rows = jnp.tile(positions, (1, groups))[:, None, :, None]
        if mask is not None:
            if mask.shape[1:3] != (1, 1):
                mask = jnp.broadcast_to(mask, (mask.shape[0], q_heads, time, mask.shape[3]))
                mask = mask.reshape(mask.shape[0], kv_heads, groups * time, -1)
            mask = jnp.broadcast_to(mask, (*mask.shape[:3], cache.max_len))
            mask = padded(mask, cache.sinks + cache.capacity - cache.max_len, axis=3)
        return cls(y.reshape(batch, kv_heads, groups * time, dim), rows, time, mask, sliding_window, softcap)

    @property
    def oldest(self) -> Int[Array, "b 1 r 1"]:
        """First token that each query sees; below 0 where its window reaches beyond the text."""
        if self.sliding_window is None:
            return jnp.zeros_like(self.positions)
        return self.positions - self.sliding_window + 1

    def sees(self, tokens: Int[Array, "b 1 1 t"]) -> Bool[Array, "b #h r t"]:
        """Mask of the tokens that each query sees; none sees token -1."""
        seen = (tokens >= jnp.maximum(self.oldest, 0)) & (tokens <= self.positions)
        if self.mask is None:
            return seen
        return seen & jnp.take_along_axis(self.mask, jnp.maximum(tokens, 0), axis=3)

    def coded(self, cache: KVCache) -> tuple[Int[Array, "b 1 r 1"], Int[Array, "b 1 r 1"]]:
        """Range of the tokens in codes that each query sees, counted after the sinks: the first one, and the one after
        the last.

        After `truncate` the newest tokens may be in codes, too.
        """
        coded = cache.coded[:, None, None, None]
        stop = self.positions + 1 if self.first_new is None else jnp.minimum(self.positions + 1, self.first_new)
        return jnp.clip(self.oldest - cache.sinks, 0, coded), jnp.clip(stop - cache.sinks, 0, coded)

    def sees_codes(
        self,
        cache: KVCache,
        first: Int[Array, "b 1 r 1"],
        stop: Int[Array, "b 1 r 1"],
        start: Int[Array, ""],
        size: int,
    ) -> Bool[Array, "b #h r size"]:
        """Tells whether each sees the tokens of a block of codes that are in its range from `first` to `stop`."""
        t = start + jnp.arange(size)
        seen = (t >= first) & (t < stop)
        if self.mask is None:
            return seen
        return seen & lax.dynamic_slice_in_dim(self.mask, cache.sinks + start, size, 3)

    def sums(
        self,
        scores: Float[Array, "b h r t"],
        seen: Bool[Array, "#b #h #r t"],
        weigh: Callable[[Float[Array, "b h r t"]], PyTree],
    ) -> Sums:
        """Sums over some tokens, by their scores; `weigh` sums their values by weights."""
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        scores = jnp.where(seen, scores, NEVER)
        largest = jnp.maximum(scores.max(-1), NEVER / 2)  # so that the weights are 0 where nothing is seen
        weights = jnp.exp(scores - largest[..., None])
        return Sums(largest, weights.sum(-1), weigh(weights))


def padded(x: Array, count: int, axis: int = 1) -> Array:
    """Pads an axis with zeros at its end."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, max(count, 0))
    return jnp.pad(x, widths)
