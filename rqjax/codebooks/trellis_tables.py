"""What the states of a trellis stand for: tables of trained levels, and arithmetic in their place."""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Integer, Shaped

from rqjax.core import check_int, pytree, static

FILE = Path(__file__).with_name("trellis_tables.npz")
"""Made by `python -m experiments.run --config=configs/trellis_tables.py`."""
STATE_BITS = {1: (6, 12), 2: (6, 12), 3: (6, 12), 4: (6, 12), 5: (8, 8), 6: (8, 8), 7: (8, 8), 8: (8, 8)}
"""The fewest and the most bits of state that there are tables for, by the bits of a code."""


@pytree
class Table:
    """A level for each state: `step * levels[state]`."""

    levels: Shaped[Array | np.ndarray, "S"]
    """int8 or a float dtype, S = 2**state_bits."""
    step: Float[Array | np.ndarray, ""]

    @property
    def state_bits(self) -> int:
        return (self.levels.shape[-1] - 1).bit_length()

    @property
    def whole(self) -> bool:
        """Whether levels are whole numbers in int8."""
        return self.levels.dtype == jnp.int8

    def __call__(self, states: Integer[Array, "*n"]) -> Shaped[Array, "*n"]:
        return jnp.asarray(self.levels).at[states].get(mode="promise_in_bounds")


@pytree
class Computed:
    """Levels by arithmetic on the state alone, for devices where look-ups are slow: the sum of the four six-bit fields
    of `multiplier * state + increment`, about normal, less its mean.

    Source: QTIP's 1MAD, which has fields of 8 bits. The defaults are the best of 400 random pairs at 8 bits of state.
    """

    step: Float[Array | np.ndarray, ""]
    state_bits: int = static()
    multiplier: int = static(default=975943951)
    increment: int = static(default=1558308413)

    @property
    def whole(self) -> bool:
        return True

    def __call__(self, states: Integer[Array, "*n"]) -> Int8[Array, "*n"]:
        mixed = states.astype(jnp.uint32) * jnp.uint32(self.multiplier) + jnp.uint32(self.increment)
        fields = [(mixed >> shift) & 63 for shift in (2, 10, 18, 26)]
        return (functools.reduce(jnp.add, fields).astype(jnp.int32) - 126).astype(jnp.int8)

    @classmethod
    def gaussian(cls, state_bits: int) -> "Computed":
        """For coordinates of unit variance."""
        whole = cls(jnp.float32(1), state_bits)
        levels = whole(jnp.arange(2**state_bits))
        return dataclasses.replace(whole, step=1 / jnp.std(levels.astype(jnp.float32)))


def trained(bits: int, state_bits: int) -> Table:
    """The committed table for coordinates of unit variance.

    Raises:
      ValueError: there is none; see `STATE_BITS`.
    """
    limits = STATE_BITS[check_int("bits", bits, 1, max(STATE_BITS))]
    levels, step = _load(bits, check_int("state_bits", state_bits, *limits))
    return Table(jnp.asarray(levels), jnp.float32(step))


def rounded(levels: Float[np.ndarray, "S"]) -> tuple[np.ndarray, float]:
    """Levels as `step * n` with whole |n| <= 127, so that products with codes can be taken in integers."""
    step = float(np.abs(levels).max() / 127)
    return np.round(levels / step).astype(np.int8), step


@functools.cache
def _load(bits: int, state_bits: int) -> tuple[np.ndarray, float]:
    with np.load(FILE) as tables:
        return tables[f"levels_{bits}_{state_bits}"], float(tables[f"step_{bits}_{state_bits}"])
