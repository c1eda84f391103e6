"""A trellis with bits of each coordinate's own, fractional ones too: it is to `Trellis` as `PerCoordinate` to
`Scalar`."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8, UInt32

from rqjax.arrays import streams, viterbi
from rqjax.arrays.planes import as_float32
from rqjax.codebooks import trellis_tables
from rqjax.codebooks.trellis_tables import Companded, Table, Turns
from rqjax.core import Vectors, check_vectors, pytree, static
from rqjax.quantizers.trellis import Trellis, by_rows
from rqjax.scoring.ring_codes import Part, RingCodes


@pytree
class TrellisPerCoordinate(RingCodes):
    """The path through a trellis that is nearest to a vector. Codes: packed indices, uint8 (*n, bytes).

    Coordinate i shifts bits[i] bits into the state, which its level, `mean + deviation * table(state)`, depends on; the
    coordinates without bits come last and are their means. One ring goes through all of them, packed by `streams.pack`.
    Coordinates with fractional bits have whole numbers of bits in turn: 2 and 3 for 2.5.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.TrellisPerCoordinate.gaussian(jnp.zeros(32), jnp.ones(32), bits=(2.5,) * 16 + (1,) * 16)
      >>> q.bits_per_vector
      56
    """

    mean: Float[Array, "d"]
    deviation: Float[Array, "d"]
    tables: tuple[Table | Companded | Turns, ...]
    """Tables of levels, one for each number of bits but 0, the most first."""
    bits: tuple[float | int, ...] = static(kw_only=True)
    """Bits of each coordinate, descending; multiples of an eighth."""

    def __post_init__(self):
        if list(self.bits) != sorted(self.bits, reverse=True) or len(self.classes) != len(self.tables):
            raise ValueError(f"expected descending bits and a table for each number of them, got {self.bits}")
        if sum(self.widths) < self.tables[0].state_bits:
            raise ValueError(
                f"expected as many bits as a state has, {self.tables[0].state_bits}, got {sum(self.widths)}"
            )

    @property
    def dim(self) -> int:
        return len(self.bits)

    @property
    def in_integers(self) -> bool:
        """True if levels come from arithmetic, which caches lay codes out for."""
        return all(isinstance(table, Companded) for table, _ in self.by_table)

    def encode(self, x: Vectors) -> UInt8[Array, "*n bytes"]:
        return by_rows(self._encode, as_float32(check_vectors(x, self.dim)), self.tables[0].state_bits)

    def decode(self, codes: UInt8[Array, "*n bytes"]) -> Float[Array, "*n d"]:
        states = self.states(codes)
        parts = [states[..., part] for _, part in self.classes]
        units = [table(part) * table.step for table, part in zip(self.tables, parts, strict=True)]
        units.append(jnp.zeros((*codes.shape[:-1], self.dim - states.shape[-1])))
        return self.mean + self.deviation * jnp.concatenate(units, axis=-1)

    def states(self, codes: UInt8[Array, "*n bytes"]) -> UInt32[Array, "*n active"]:
        """The state of each coordinate that has bits: a window that slides over the stream."""
        bits, size = self.widths.tolist(), self.tables[0].state_bits
        if size == streams.WINDOW:
            return streams.vector_windows(codes, bits).astype(jnp.uint32)
        return viterbi.windows(streams.unpack_vectors(codes, bits).astype(jnp.uint32), bits, size)

    @property
    def widths(self) -> np.ndarray:
        """Whole numbers of bits that go into the stream, of the coordinates that have bits."""
        return np.concatenate([trellis_tables.widths(b, part.stop - part.start) for b, part in self.classes])

    @property
    def classes(self) -> list[tuple[float | int, slice]]:
        """Numbers of bits, each with the coordinates that have as many."""
        starts = [(b, self.bits.index(b), self.bits.count(b)) for b in dict.fromkeys(self.bits) if b]
        return [(b, slice(start, start + count)) for b, start, count in starts]

    @property
    def parts(self) -> list[Part]:
        ends = streams.closed_ends(self.widths)
        return [
            Part(some, ends[some], self.deviation[some] * table.step, table, fine=not table.whole)
            for table, some in self.by_table
        ]

    @property
    def center(self) -> Float[Array, "d"]:
        return self.mean

    def stream(self, codes: UInt8[Array, "b h t bytes"]) -> UInt8[Array, "b h rows t"]:
        return streams.closed(jnp.swapaxes(codes, 2, 3), int(self.widths.sum()))

    @property
    def by_table(self) -> list[tuple[Table | Companded, slice | np.ndarray]]:
        """All coordinates with bits, by the table of their levels."""
        found = []
        for table, (b, part) in zip(self.tables, self.classes, strict=True):
            if isinstance(table, Turns):
                wide = trellis_tables.widths(b, part.stop - part.start) > b
                places = np.arange(part.start, part.stop)
                found += [(table.more, places[wide]), (table.fewer, places[~wide])]
            else:
                found.append((table, part))
        return found

    def _encode(self, x: Float[Array, "n d"]) -> UInt8[Array, "n bytes"]:
        unit = jnp.where(self.deviation > 0, self.deviation, 1)  # constant coordinates weigh nothing
        z, weights = (a.astype(jnp.float32) for a in (((x - self.mean) / unit).T, self.deviation**2))
        segments = [
            viterbi.Segment(z[part], trellis_tables.values(table, b), trellis_tables.turns(b), weights[part])
            for table, (b, part) in zip(self.tables, self.classes, strict=True)
        ]
        return streams.pack(viterbi.tail_biting(segments), self.widths).T

    @classmethod
    def gaussian(
        cls,
        mean: Float[Array, "d"],
        deviation: Float[Array, "d"],
        bits: tuple[float | int, ...],
        *,
        state_bits: int = 8,
    ) -> "TrellisPerCoordinate":
        """The tables of Gaussian coordinates; `bits` of each, descending, from 0.5 to 8 or 0."""
        tables = tuple(trellis_tables.trained(b, state_bits) for b in dict.fromkeys(bits) if b)
        return cls(mean, deviation, tables, bits=bits)


GAINS = tuple(2 ** (i / 4) for i in range(-4, 4))
"""Multiples of a vector that `BestGain` chooses among."""
REACH = 0.6
"""Part of the largest level up to which a coordinate's error is that of its bits. The path to an outer level fixes the
levels nearby."""


@pytree
class BestGain(TrellisPerCoordinate):
    """`TrellisPerCoordinate` of the multiple of a vector that its levels reach best, to be `Scaled`, which undoes that.

    Vectors differ in how their energy lies over the coordinates. Where coordinates with few bits are loud a smaller
    multiple brings them within reach, and where none is a larger one has finer steps. The multiple is chosen by an
    estimate of the error, before one search for the path.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.Scaled(rqjax.BestGain.gaussian(jnp.zeros(32), 0.9 ** jnp.arange(32), bits=(4,) * 8 + (1,) * 24))
      >>> q.decode(q.encode(jnp.ones((5, 32)))).shape
      (5, 32)
    """

    def _encode(self, x: Float[Array, "n d"]) -> UInt8[Array, "n bytes"]:
        reach, error = jnp.zeros(self.dim), jnp.ones(self.dim)
        for table, (bits, part) in zip(self.tables, self.classes, strict=True):
            largest = jnp.abs(trellis_tables.values(table, bits)).max()
            reach, error = reach.at[part].set(REACH * largest), error.at[part].set(trellis_tables.error(bits))

        def expected(gain: float) -> Float[Array, "n"]:
            """Estimates squared errors: those of Gaussian coordinates of as many bits, and what is out of reach."""
            beyond = jnp.abs(gain * x - self.mean) - self.deviation * reach
            return jnp.sum(self.deviation**2 * error + jnp.maximum(beyond, 0) ** 2, axis=-1) / gain**2

        best = jnp.argmin(jnp.stack(list(map(expected, GAINS))), axis=0)
        return super()._encode(x * jnp.asarray(GAINS)[best][:, None])


def trellis_coded(
    dim: int, bits: float | int, *, sphere_dim: int | None = None, state_bits: int = 8
) -> Trellis | TrellisPerCoordinate:
    """A trellis for the coordinates of a random unit vector, with trained levels.

    Args:
      dim: the number of coordinates to quantize.
      bits: bits a coordinate, a multiple of 1/8 from 0.5 to 8; `dim * bits` in all, rounded down to whole ones where
        they are fractional.
      sphere_dim: the dimension of the unit vector, `dim` unless the coordinates are a part of it.
      state_bits: L, from 6 to 12 for 1, 1.5, ..., 4 bits and 8 for others: encoding takes time and memory as 2^L.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.trellis_coded(dim=64, bits=2, state_bits=10)
      Trellis(2 bits)
      >>> rqjax.trellis_coded(dim=64, bits=2.5).bits_per_vector
      160
    """
    table = trellis_tables.trained(bits, state_bits)
    scale = 1 / math.sqrt(dim if sphere_dim is None else sphere_dim)
    if isinstance(table, Turns):
        return TrellisPerCoordinate(jnp.zeros(dim), jnp.full(dim, scale), (table,), bits=(table.bits,) * dim)
    return Trellis(dataclasses.replace(table, step=table.step * scale), dim=dim, bits=int(bits))
