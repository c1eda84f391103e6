"""The Viterbi algorithm on a bit-shift trellis, for many vectors side by side, and closed to a ring.

A state is the last L bits of a stream of codes, the newest on top. A code c of b bits takes state s to (s >> b) + c
2^(L-b). The 2^b states that differ only in their lowest b bits, their oldest, thus lead to the same 2^b states: they
are a family. Time is the first axis, and the n vectors are the last one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8, UInt32

from rqjax.core.mesh import varying

IMPOSSIBLE = 1e30
"""The cost of a state that a path may not be in; float32 still adds and compares it."""


class Segment(NamedTuple):
    """Consecutive samples whose codes have equally many bits, or a few numbers of bits in turn; all in float32."""

    y: Float[Array, "T n"]
    values: Float[Array, "turns S"]
    """Level of each of the S = 2^L states."""
    bits: tuple[int, ...]
    """Bits of a code in each turn; the first sample has the first turn."""
    weights: Float[Array, "T"] | None = None
    """Weight of the squared error at each time; None stands for 1."""

    def cut(self, start: int, stop: int) -> "Segment":
        """The samples from `start` to `stop`."""
        turns = [(start + turn) % len(self.bits) for turn in range(min(len(self.bits), stop - start))]
        weights = None if self.weights is None else self.weights[start:stop]
        bits = tuple(self.bits[turn] for turn in turns)
        return Segment(self.y[start:stop], self.values[np.array(turns, int)], bits, weights)


def tail_biting(segments: Sequence[Segment]) -> UInt8[Array, "T n"]:
    """Codes of a path that ends in the state in which it starts, so that only they are stored.

    A free path through the samples around the seam gives the family in which both ends meet. The best path through that
    family follows. Its error is within 1 % of the best over all families.
    """
    bits = np.concatenate([np.resize(segment.bits, len(segment.y)) for segment in segments])
    state_bits, total = _state_bits(segments), len(bits)
    window = math.ceil(8 * state_bits * max(len(s.bits) / sum(s.bits) for s in segments))
    window = max(1, min(total // 2, window))
    before = _cut(segments, total - window, total)
    families = path([*before, *_cut(segments, 0, window)])[window - 1] >> segments[0].bits[0]
    rings = path(segments, families)
    return (rings >> (state_bits - bits[:, None]).astype(np.uint32)).astype(jnp.uint8)


def path(segments: Sequence[Segment], families: UInt32[Array, "n"] | None = None) -> UInt32[Array, "T n"]:
    """The states of the path with the least squared error.

    Args:
      segments: samples.
      families: family of the state before the first and of the last state; if not given, paths are free at both ends.
    """
    every = jnp.arange(2 ** _state_bits(segments), dtype=jnp.uint32)[:, None]
    count, steps = segments[0].y.shape[1], []
    barred = families is not None and every >> segments[0].bits[0] != families
    cost = jnp.where(barred, IMPOSSIBLE, jnp.zeros((len(every), count), jnp.float32))
    cost = varying(cost, segments)
    for segment in segments:
        whole = len(segment.y) // len(segment.bits) * len(segment.bits)
        for part in (segment.cut(0, whole), segment.cut(whole, len(segment.y))):
            if len(part.y):
                cost, oldest = _forward(part, cost)
                steps.append(oldest)
    state = jnp.argmin(jnp.where(barred, IMPOSSIBLE, cost), axis=0).astype(jnp.uint32)
    found = []
    for oldest in reversed(steps):
        state, states = _backward(oldest, state, len(every))
        found.append(states)
    return jnp.concatenate(found[::-1])


def windows(codes: UInt32[Array, "*n T"], bits: Sequence[int], state_bits: int) -> UInt32[Array, "*n T"]:
    """State after each code of a ring. Codes run in time along the last axis and have `bits` each."""
    each = np.array(bits)
    states, above = jnp.zeros_like(codes), np.zeros(len(each), int)
    back = 0
    while (above < state_bits).any():  # adds the code `back` times ago below the newer ones
        shift = state_bits - above - np.roll(each, back)
        up, down = (np.clip(amount, 0, 31).astype(np.uint32) for amount in (shift, -shift))
        states = states | jnp.where(above < state_bits, jnp.roll(codes, back, axis=-1) << up >> down, 0)
        above, back = above + np.roll(each, back), back + 1
    return states


def _forward(
    segment: Segment, cost: Float[Array, "S n"]
) -> tuple[Float[Array, "S n"], list[UInt8[Array, "rounds _ n"]]]:
    """Least cost of each state after a segment of whole rounds, and the survivors of each turn. A survivor is the
    lowest bits of the best state of a family at a time."""
    size, count = cost.shape
    branches_of = [2**bits for bits in segment.bits]
    levels_of = [levels.reshape(n, -1, 1) for levels, n in zip(segment.values, branches_of, strict=True)]

    def step(cost: Array, at: tuple[Array, Array | None]) -> tuple[Array, list[Array]]:
        samples, weights = at
        steps = []
        for turn, (levels, branches) in enumerate(zip(levels_of, branches_of, strict=True)):
            # The branch index replaces the cost's low mantissa bits, so one min is also the argmin.
            low = jnp.uint32(branches - 1)
            keys = lax.bitcast_convert_type(cost, jnp.uint32).reshape(size // branches, branches, count) & ~low
            best = jnp.min(keys | jnp.arange(branches, dtype=jnp.uint32)[:, None], axis=1)
            error = (samples[turn] - levels) ** 2
            error = error if weights is None else weights[turn] * error
            cost = (lax.bitcast_convert_type(best & ~low, jnp.float32) + error).reshape(size, count)
            steps.append((best & low).astype(jnp.uint8))
        return cost, steps

    turns = len(segment.bits)
    in_rounds = lambda x: x.reshape(len(x) // turns, turns, *x.shape[1:])  # noqa: E731
    return lax.scan(step, cost, jax.tree.map(in_rounds, (segment.y, segment.weights)))


def _backward(
    oldest: list[UInt8[Array, "rounds _ n"]], last: UInt32[Array, "n"], size: int
) -> tuple[UInt32[Array, "n"], UInt32[Array, "T n"]]:
    """Traces the path back from the last state: returns the state before the segment, and the states in it."""

    def step(state: Array, bests: list[Array]) -> tuple[Array, Array]:
        states = []
        for best in reversed(bests):
            states.append(state)
            family = state & (len(best) - 1)
            state = family * (size // len(best)) + jnp.take_along_axis(best, family[None], axis=0)[0]
        return state, jnp.stack(states[::-1])

    state, states = lax.scan(step, last, oldest, reverse=True)
    return state, states.reshape(len(states) * len(oldest), *last.shape)


def _cut(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """The segments of the times from `start` to `stop`."""
    found, time = [], 0
    for segment in segments:
        first, last = (min(max(at - time, 0), len(segment.y)) for at in (start, stop))
        time += len(segment.y)
        if first < last:
            found.append(segment.cut(first, last))
    return found


def _state_bits(segments: Sequence[Segment]) -> int:
    return segments[0].values.shape[1].bit_length() - 1
