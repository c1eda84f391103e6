"""Levels of the states of a trellis: trained ones in tables, and by arithmetic."""

import fractions
import functools
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Shaped, UInt8

from rqjax.arrays.levels import mirrored
from rqjax.core import check_int, pytree, static

FILE = Path(__file__).with_name("trellis_tables.npz")
"""File of tables, made by `python -m experiments.run --config=configs/codes/trellis_tables.py:all`."""
STATE_BITS = {
    **dict.fromkeys((1, 1.5, 2, 2.5, 3, 3.5, 4), (6, 12)),
    **dict.fromkeys((0.5, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75), (8, 8)),
    **dict.fromkeys((4.5, 5, 5.5, 6, 6.5, 7, 7.5, 8), (8, 8)),
}
"""Fewest and most state bits of the committed tables, by the bits of a code."""
LEAST, PARTS = 0.5, 8
"""Fewest bits of a code, and the steps per bit in which codes differ."""
FINE = 7.5
"""Bits of a code from which on the levels of 2^8 states are in int16."""

ERRORS = (1, 0.566, 0.289, 0.149, 0.0762, 0.0392, 0.0199, 0.0105, 0.00546, 0.00286, 0.00148, 0.00081, 0.000425)
ERRORS += (0.000249, 0.000137, 7.23e-5, 4.14e-5)
"""Mean squared errors of Gaussian coordinates of unit variance at 0, 0.5, ..., 8 bits, with 2^8 states (3,000 vectors
of 64 coordinates)."""


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
        """True if levels are whole numbers in int8."""
        return self.levels.dtype == jnp.int8

    def __call__(self, states: Integer[Array, "*n"]) -> Shaped[Array, "*n"]:
        return jnp.asarray(self.levels).at[states].get(mode="promise_in_bounds")


@pytree
class Companded:
    """Levels of 2^8 states by arithmetic on bytes, which a CPU vectorizes where it would load one level at a time.

    A state times an odd number, modulo 256, is a place on a line. Codes that may follow on a state are spread evenly
    over it. Older codes shift them by less than their spacing, as with the cosets of Ungerboeck's codes. From the
    middle of the line outwards levels are further and further apart: their slope grows at each bend.

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
    """Shift of a scrambling of states: if not 0, the state s is first replaced by s ^ (s >> fold)."""
    whole: bool = static(default=True)
    """True if levels are in int8, with slopes and offset in halves; False if they are in int16."""

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


@pytree
class Turns:
    """Levels of coordinates with fractional bits: whole numbers of bits take turns, each with a table of its own. A
    coordinate also draws on the bits of its neighbors, so that all have about the same error."""

    more: Table | Companded
    fewer: Table | Companded
    bits: float | int = static()

    step = 1.0

    @property
    def state_bits(self) -> int:
        return self.more.state_bits

    def __call__(self, states: Integer[Array, "*n d"]) -> Float[Array, "*n d"]:
        """The levels of coordinates that begin with the first turn."""
        first, second = (table(states) * table.step for table in (self.more, self.fewer))
        return jnp.where(widths(self.bits, states.shape[-1]) > self.bits, first, second)


def turns(bits: float | int) -> tuple[int, ...]:
    """Whole numbers of bits that coordinates have in turns, spread evenly; a whole number is its only turn.

    Raises:
      ValueError: `bits` is no multiple of an eighth from 0.5 to 8.

    Example:
      >>> from rqjax.codebooks.trellis_tables import turns
      >>> turns(2.5), turns(0.75), turns(3)
      ((2, 3), (0, 1, 1, 1), (3,))
    """
    number = isinstance(bits, int | float | np.number) and not isinstance(bits, bool)
    if not number or not float(PARTS * bits).is_integer() or not LEAST <= bits <= max(STATE_BITS):
        raise ValueError(f"expected bits to be a multiple of 1/{PARTS} from {LEAST} to {max(STATE_BITS)}, got {bits!r}")
    ends = [math.floor(turn * bits) for turn in range(fractions.Fraction(float(bits)).denominator + 1)]
    return tuple(np.diff(ends).tolist())


def widths(bits: float | int, count: int) -> Int[np.ndarray, "count"]:
    """Whole numbers of bits of so many coordinates; their sum is `count * bits`, rounded down."""
    return np.resize(turns(bits), count)


def error(bits: float | int) -> float:
    """Interpolates `ERRORS` geometrically.

    Example:
      >>> from rqjax.codebooks.trellis_tables import error
      >>> round(error(2.25), 4)
      0.0547
    """
    return float(np.exp(np.interp(2 * bits, np.arange(len(ERRORS)), np.log(ERRORS))))


def values(table: "Table | Companded | Turns", bits: float | int) -> Float[Array, "turns S"]:
    """Level of each state, at each of the turns."""
    states = jnp.arange(2**table.state_bits, dtype=jnp.uint32)
    return (table(jnp.stack([states] * len(turns(bits)), axis=-1)) * table.step).T


def trained(bits: float | int, state_bits: int = 8) -> Table | Companded | Turns:
    """Loads the committed levels for coordinates of unit variance; those of 2^8 states are `Companded`.

    Fractional bits without levels of their own take those of the nearest fraction.

    Raises:
      ValueError: there is none; see `STATE_BITS`.
    """
    whole = len(turns(bits)) == 1
    alike = [b for b in STATE_BITS if math.floor(b) == math.floor(bits) and float(b).is_integer() == whole]
    nearest = min(alike, key=lambda b: abs(b - bits))
    state_bits = check_int("state_bits", state_bits, *STATE_BITS[nearest])

    def read(part: int | tuple[()]) -> Table | Companded:
        def of(name: str) -> np.ndarray:
            return np.asarray(_load()[f"{name}_{nearest:g}_{state_bits}"][part])

        step = jnp.float32(of("step"))
        if state_bits != 8:
            return Table(jnp.asarray(of("levels")), step)
        bends = tuple((start, slope) for start, slope in of("bends").tolist())
        multiplier, offset, fold = (int(of(name)) for name in ("multiplier", "offset", "fold"))
        return Companded(step, multiplier, bends, offset, fold, whole=nearest < FINE)

    return read(()) if whole else Turns(read(0), read(1), float(bits))


def rounded(levels: Float[np.ndarray, "S"]) -> tuple[np.ndarray, float]:
    """Levels as `step * n` with whole |n| <= 127, so that products with codes can be taken in integers."""
    step = float(np.abs(levels).max() / 127)
    return np.round(levels / step).astype(np.int8), step


@functools.cache
def _load() -> dict[str, np.ndarray]:
    with np.load(FILE) as tables:
        return dict(tables)
