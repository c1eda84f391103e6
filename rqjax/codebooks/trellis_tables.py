"""What the states of a trellis stand for: tables of trained levels, and arithmetic in their place."""

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int8, Integer, Shaped, UInt8

from rqjax.arrays.levels import look_up
from rqjax.core import check_int, pytree, static

FILE = Path(__file__).with_name("trellis_tables.npz")
"""Made by `python -m experiments.run --config=configs/trellis_tables.py`."""
STATE_BITS = {1: (6, 12), 2: (6, 12), 3: (6, 12), 4: (6, 12), 5: (8, 8), 6: (8, 8), 7: (8, 8), 8: (8, 8)}
"""The fewest and the most bits of state that there are tables for, by the bits of a code."""


@pytree
class Table:
    """A level for each state: `step * levels[state]`."""

    levels: Shaped[Array | np.ndarray, "S"]
    """int8, int16 or a float dtype, S = 2**state_bits."""
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


@pytree
class Summed:
    """Levels of 2^8 states, each the sum of look-ups among 16: a CPU, a GPU and a TPU select those, where a look-up
    among 256 is one load for each coordinate.

    The place in a table is four bits, from `low` on, of s ^ (s >> right) ^ (s << left) for the state s; shifts by 0 are
    left out. In the order of their places the numbers of a table are antisymmetric.
    """

    tables: Integer[Array | np.ndarray, "*heads count 16"]
    """int8; int16 of more than 4 bits."""
    step: Float[Array | np.ndarray, ""]
    places: tuple[tuple[int, int, int], ...] = static()
    """(right, left, low) of each table."""

    @property
    def state_bits(self) -> int:
        return 8

    @property
    def whole(self) -> bool:
        return self.tables.dtype == jnp.int8

    def __call__(self, states: Integer[Array, "*n"]) -> Integer[Array, "*n"]:
        tables = jnp.asarray(self.tables)
        parts = [look_up(self.place(states, i), tables[i], symmetric=True) for i in range(len(self.places))]
        return functools.reduce(jnp.add, parts)

    def place(self, states: Integer[Array, "*n"], i: int) -> UInt8[Array, "*n"]:
        """Where states look up in the i-th table."""
        s, (right, left, low) = states.astype(jnp.uint8), self.places[i]
        mixed = s ^ (s >> right) if right else s
        mixed = mixed ^ (s << left) if left else mixed
        return (mixed >> low) & 15


def trained(bits: int, state_bits: int = 8) -> Table | Summed:
    """The committed table for coordinates of unit variance; up to 4 bits with 2^8 states it is `Summed`.

    Raises:
      ValueError: there is none; see `STATE_BITS`.
    """
    limits = STATE_BITS[check_int("bits", bits, 1, max(STATE_BITS))]
    state_bits, arrays = check_int("state_bits", state_bits, *limits), _load()
    place = f"{bits}_{state_bits}"
    step = jnp.float32(arrays[f"step_{place}"])
    if f"places_{place}" in arrays:
        places = tuple(tuple(place) for place in arrays[f"places_{place}"].tolist())
        return Summed(jnp.asarray(arrays[f"levels_{place}"]), step, places)
    levels = arrays[f"levels_{place}"]
    if bits > 4:
        step = jnp.float32(np.abs(levels).max() / 32_639)  # so that two limbs in int8 hold them
        levels = np.round(levels / step).astype(np.int16)
    return Table(jnp.asarray(levels), step)


def rounded(levels: Float[np.ndarray, "S"]) -> tuple[np.ndarray, float]:
    """Levels as `step * n` with whole |n| <= 127, so that products with codes can be taken in integers."""
    step = float(np.abs(levels).max() / 127)
    return np.round(levels / step).astype(np.int8), step


@functools.cache
def _load() -> dict[str, np.ndarray]:
    with np.load(FILE) as tables:
        return dict(tables)
