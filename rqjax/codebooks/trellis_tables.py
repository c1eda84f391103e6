"""What the states of a trellis stand for: trained levels in tables, and by arithmetic."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer, Shaped, UInt8

from rqjax.arrays.levels import mirrored
from rqjax.core import check_int, pytree, static

FILE = Path(__file__).with_name("trellis_tables.npz")
"""Made by `python -m experiments.run --config=configs/trellis_tables.py`."""
STATE_BITS = {1: (6, 12), 2: (6, 12), 3: (6, 12), 4: (6, 12), 5: (8, 8), 6: (8, 8), 7: (8, 8), 8: (8, 8)}
"""The fewest and the most bits of state that there are tables for, by the bits of a code."""
FINE = 8
"""Bits from which on the levels of 2^8 states are in int16."""


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
class Companded:
    """Levels of 2^8 states by arithmetic on bytes, which a CPU vectorizes where it would load one level at a time.

    A state times an odd number, modulo 256, is a place on a line: the codes that may follow on a state are spread
    evenly over it, and what came before shifts them by less than their spacing, as the cosets of Ungerboeck's codes
    are. From the middle of the line outwards levels are further and further apart: they are steeper from each bend on.

    Source: trellis-coded quantization (Marcellin and Fischer 1990, IEEE Trans. Commun. 38), levels without a table
    (QTIP, Tseng et al. 2024, arXiv:2406.11235).
    """

    step: Float[Array | np.ndarray, ""]
    multiplier: int = static()
    bends: tuple[tuple[int, int], ...] = static()
    """Distance from the middle, at most 127, and how much steeper levels are from there on; the first is at 0."""
    offset: int = static(default=0)
    """The level next to the middle."""
    fold: int = static(default=0)
    """If not 0, the state s is first replaced by s ^ (s >> fold)."""
    whole: bool = static(default=True)
    """Whether levels are in int8; then slopes and offset are in halves. Else they are in int16."""

    @property
    def state_bits(self) -> int:
        return 8

    def __call__(self, states: Integer[Array, "*n"]) -> Integer[Array, "*n"]:
        place = states.astype(jnp.uint8)
        place = (place ^ (place >> self.fold) if self.fold else place) * jnp.uint8(self.multiplier)
        return mirrored(place, 128, self._sizes)

    def _sizes(self, upper: UInt8[Array, "*n"]) -> Integer[Array, "*n"]:
        """The levels of places from the middle on."""
        distance = (upper & 127).astype(jnp.uint8 if self.whole else jnp.uint16)
        parts = [slope * (jnp.maximum(distance, start) - start) for start, slope in self.bends]
        sizes = functools.reduce(jnp.add, parts) + self.offset
        return (sizes >> 1).astype(jnp.int8) if self.whole else sizes.astype(jnp.int16)


def trained(bits: int, state_bits: int = 8) -> Table | Companded:
    """The committed levels for coordinates of unit variance; of 2^8 states they are `Companded`.

    Raises:
      ValueError: there is none; see `STATE_BITS`.
    """
    limits = STATE_BITS[check_int("bits", bits, 1, max(STATE_BITS))]
    state_bits, arrays = check_int("state_bits", state_bits, *limits), _load()
    place = f"{bits}_{state_bits}"
    step = jnp.float32(arrays[f"step_{place}"])
    if state_bits == 8:
        bends = tuple((start, slope) for start, slope in arrays[f"bends_{place}"].tolist())
        multiplier, offset, fold = (int(arrays[f"{name}_{place}"]) for name in ("multiplier", "offset", "fold"))
        return Companded(step, multiplier, bends, offset, fold, whole=bits < FINE)
    return Table(jnp.asarray(arrays[f"levels_{place}"]), step)


def rounded(levels: Float[np.ndarray, "S"]) -> tuple[np.ndarray, float]:
    """Levels as `step * n` with whole |n| <= 127, so that products with codes can be taken in integers."""
    step = float(np.abs(levels).max() / 127)
    return np.round(levels / step).astype(np.int8), step


@functools.cache
def _load() -> dict[str, np.ndarray]:
    with np.load(FILE) as tables:
        return dict(tables)
