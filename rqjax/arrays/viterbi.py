"""The Viterbi algorithm on a bit-shift trellis, for many vectors side by side, and closed to a ring.

A state is the last L bits of a stream of codes, the newest on top: a code c of b bits takes state s to
(s >> b) + c 2^(L-b). The 2^b states that differ only in their lowest b bits, their oldest, thus lead to the same 2^b
states: they are a family. Time comes first, and the vectors (n of them) last.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

IMPOSSIBLE = 1e30
"""The cost of a state that a path may not be in; float32 still adds and compares it."""


class Segment(NamedTuple):
    """Samples that follow each other and have codes of the same number of bits; everything in float32."""

    y: Float[Array, "T n"]
    values: Float[Array, "S"]
    """What each of the S = 2^L states stands for."""
    bits: int
    weights: Float[Array, "T"] | None = None
    """Of the squared error at each time, 1 if there are none."""


def tail_biting(segments: Sequence[Segment]) -> list[UInt8[Array, "T n"]]:
    """Codes of a path that ends where it starts, so that they are all there is to store; a list as of `path`.

    The family that both ends meet in is the one that a free path has in the middle of the samples around the seam; the
    best path through it follows. That is within 1 % of the best over all families.
    """
    state_bits, total = _state_bits(segments), sum(len(segment.y) for segment in segments)
    window = min(total // 2, -(-8 * state_bits // min(segment.bits for segment in segments)))
    before = _cut(segments, total - window, total)
    around = path([*before, *_cut(segments, 0, window)])
    families = around[len(before) - 1][-1] >> segments[0].bits
    rings = path(segments, families)
    return [
        (states >> (state_bits - segment.bits)).astype(jnp.uint8)
        for segment, states in zip(segments, rings, strict=True)
    ]


def path(segments: Sequence[Segment], families: UInt32[Array, "n"] | None = None) -> list[UInt32[Array, "T n"]]:
    """The states of the path with the least squared error, those of each segment.

    Args:
      segments: samples.
      families: of the state before the first and of the last one; if none are given, paths start and end anywhere.
    """
    every = jnp.arange(2 ** _state_bits(segments), dtype=jnp.uint32)[:, None]
    count, steps = segments[0].y.shape[1], []
    barred = families is not None and every >> segments[0].bits != families
    cost = jnp.where(barred, IMPOSSIBLE, jnp.zeros((len(every), count), jnp.float32))
    for segment in segments:
        cost, oldest = _forward(segment, cost)
        steps.append(oldest)
    state = jnp.argmin(jnp.where(barred, IMPOSSIBLE, cost), axis=0).astype(jnp.uint32)
    found = []
    for oldest in reversed(steps):
        state, states = _backward(oldest, state, len(every) // oldest.shape[1])
        found.append(states)
    return found[::-1]


def windows(codes: UInt32[Array, "*n T"], bits: Sequence[int], state_bits: int) -> UInt32[Array, "*n T"]:
    """The state after each code of a ring; codes in time, along the last axis, and the bits of each."""
    each = np.array(bits)
    states, above = jnp.zeros_like(codes), np.zeros(len(each), int)
    back = 0
    while (above < state_bits).any():  # the code so many times ago, below the bits of those since
        shift = state_bits - above - np.roll(each, back)
        up, down = (np.clip(amount, 0, 31).astype(np.uint32) for amount in (shift, -shift))
        states = states | jnp.where(above < state_bits, jnp.roll(codes, back, axis=-1) << up >> down, 0)
        above, back = above + np.roll(each, back), back + 1
    return states


def _forward(segment: Segment, cost: Float[Array, "S n"]) -> tuple[Float[Array, "S n"], UInt8[Array, "T families n"]]:
    """The least cost of each state at the end of a segment; and at each time, for each family, the lowest bits of the
    best of its states."""
    branches, (size, count) = 2**segment.bits, cost.shape
    levels, low = segment.values.reshape(branches, -1, 1), jnp.uint32(branches - 1)

    def step(cost: Array, at: tuple[Array, Array | None]) -> tuple[Array, Array]:
        # The branch index replaces the cost's low mantissa bits, so one min is also the argmin.
        sample, weight = at
        keys = lax.bitcast_convert_type(cost, jnp.uint32).reshape(size // branches, branches, count) & ~low
        best = jnp.min(keys | jnp.arange(branches, dtype=jnp.uint32)[:, None], axis=1)
        error = (sample - levels) ** 2
        cost = lax.bitcast_convert_type(best & ~low, jnp.float32) + (error if weight is None else weight * error)
        return cost.reshape(size, count), (best & low).astype(jnp.uint8)

    return lax.scan(step, cost, (segment.y, segment.weights))


def _backward(
    oldest: UInt8[Array, "T families n"], last: UInt32[Array, "n"], branches: int
) -> tuple[UInt32[Array, "n"], UInt32[Array, "T n"]]:
    """The state before a segment, and the states in it, from the last of them."""

    def step(state: Array, best: Array) -> tuple[Array, Array]:
        family = state & (len(best) - 1)
        return family * branches + jnp.take_along_axis(best, family[None], axis=0)[0], state

    return lax.scan(step, last, oldest, reverse=True)


def _cut(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """The segments of the times from `start` to `stop`."""
    found, time = [], 0
    for segment in segments:
        part = slice(max(start - time, 0), max(stop - time, 0))
        time += len(segment.y)
        if len(segment.y[part]):
            weights = None if segment.weights is None else segment.weights[part]
            found.append(segment._replace(y=segment.y[part], weights=weights))
    return found


def _state_bits(segments: Sequence[Segment]) -> int:
    return len(segments[0].values).bit_length() - 1
