"""Levels of the states of trellis codes."""

import dataclasses

import jax
import numpy as np

STATES = 256


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Companded:
    """Levels of states by arithmetic.

    A state s is first folded to s ^ (s >> fold), unless `fold` is 0. Let p = s multiplier mod 256, and x the distance
    of p from the middle of 0 to 255, rounded down. The level is half of the offset plus the sum of
    slope * max(x - start, 0) over the bends (start, slope), with the sign of p - 127.5. The first bend is at 0.
    """

    multiplier: int
    bends: tuple[tuple[int, int], ...]
    offset: int = 0
    fold: int = 0

    def levels(self) -> np.ndarray:
        """The levels of all states, int8."""
        state = np.arange(STATES)
        place = (state ^ state >> self.fold if self.fold else state) * self.multiplier % STATES
        upper = place >= STATES // 2
        distance = np.where(upper, place - STATES // 2, STATES // 2 - 1 - place)
        size = sum((slope * np.maximum(distance - start, 0) for start, slope in self.bends), self.offset) >> 1
        return np.where(upper, size, -size).astype(np.int8)
