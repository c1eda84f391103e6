"""The rules of leaves whose codes a cache holds as streams of bits: trellises, lattices, levels of one coordinate each.

Coordinates come in parts whose levels are made alike. What is a coordinate's own, its scale, is multiplied into queries
and sums; all parts share the limbs of queries and of weights.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from rqjax.arrays import packing, streams
from rqjax.arrays.blocks import inner
from rqjax.arrays.levels import look_up
from rqjax.arrays.planes import materialized
from rqjax.core import Codes
from rqjax.quantizers.nested_e8 import NestedE8
from rqjax.quantizers.per_coordinate import Columns, Whole
from rqjax.quantizers.trellis import Trellis
from rqjax.quantizers.trellis_per_coordinate import TrellisColumns
from rqjax.scoring import integers
from rqjax.scoring.rules import DECODED, RULES, Rule
from rqjax.scoring.tiles import TokenArray

SELECTED = 64
"""Levels of a coordinate up to which the one is selected, not loaded."""


class Part(NamedTuple):
    """Coordinates whose levels are whole numbers, times a factor of each."""

    coordinates: slice | np.ndarray
    ends: np.ndarray
    """Where in the stream the codes end that levels are made of."""
    factors: Float[Array | np.ndarray, "n"]
    levels: Callable[[UInt8[Array, "b h codes t"]], Shaped[Array, "b h n t"]]
    """Of the windows of the codes: in int8, or if they are `fine` in int16."""
    fine: bool
    bits: int | None = None
    """Of an index, the highest of a window, where each coordinate has levels of its own; None: all share those of the
    states."""

    @property
    def units(self) -> list[Float[Array | np.ndarray, "n"]]:
        """What its limbs are multiples of, the high ones first."""
        return [256 * self.factors, self.factors] if self.fine else [self.factors]

    def limbs(self, windows: UInt8[Array, "b h codes t"]) -> list[Int8[Array, "b h n t"]]:
        if not self.fine:
            return [self.levels(windows)]
        levels = materialized(self.levels(windows))
        return [((levels + 128) >> 8).astype(jnp.int8), lax.bitcast_convert_type(levels.astype(jnp.uint8), jnp.int8)]

    @property
    def tables(self) -> list[Int8[Array, "n levels"]]:
        """For each unit the levels of every index, of each coordinate or, n = 1, of all."""
        bits = streams.WINDOW if self.bits is None else self.bits
        windows = jnp.arange(2**bits, dtype=jnp.uint8) << (streams.WINDOW - bits)
        rows = 1 if self.bits is None else len(self.ends)
        return [x[0, 0] for x in self.limbs(jnp.broadcast_to(windows, (1, 1, rows, 2**bits)))]


def scaled(several: Sequence[Part], y: Float[Array, "b h r d"]) -> Float[Array, "b h r columns"]:
    """Queries as they are multiplied with the limbs of all parts."""
    return jnp.concatenate([y[..., part.coordinates] * unit for part in several for unit in part.units], axis=-1)


def placed(several: Sequence[Part], sums: Float[Array, "b h r columns"], dim: int) -> Float[Array, "b h r d"]:
    """What sums of the limbs of all parts stand for."""
    x, start = jnp.zeros((*sums.shape[:-1], dim)), 0
    for part in several:
        for unit in part.units:
            x = x.at[..., part.coordinates].add(sums[..., start : start + len(unit)] * unit)
            start += len(unit)
    return x


def of_streams(
    stream: Callable[[Any, Codes], UInt8[Array, "b h bytes t"]],
    parts: Callable[[Any], Sequence[Part]],
    mean: Callable[[Any], Float[Array, "d"] | None],
) -> Rule:
    """The rule of a leaf.

    Args:
      stream: codes as `encode` returns them, in the layout of `arrays.streams`.
      parts: all coordinates with bits; those without come last and are left out.
      mean: what is added to the levels of each vector.
    """

    def rows(q: Any, codes: Codes) -> Int8[Array, "b h n t"]:
        """The levels of all parts, for one product: the products of parts would take twice as long."""
        several, laid_out = parts(q), isinstance(codes, tuple)
        bits = codes[0] if laid_out else stream(q, codes)
        bits = bits if laid_out and len(several) == 1 else materialized(bits)
        found = [part.limbs(streams.windows(bits, part.ends)) for part in several]
        return jnp.concatenate(list(itertools.chain(*found)), axis=2)

    def prepare(q: Any, y: Float[Array, "b h r d"]) -> Any:
        center = mean(q)
        return integers.query_limbs(scaled(parts(q), y)), None if center is None else inner(y, center)[..., None]

    def scores(q: Any, y: Any, codes: Codes, transposed: bool) -> Float[Array, "b h r t"]:
        found = integers.row_products(y[0], rows(q, codes))
        return found if y[1] is None else found + y[1]

    def weigh(q: Any, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return integers.sums(w, rows(q, codes)), None if mean(q) is None else w.sum(-1, keepdims=True)

    def restore(q: Any, sums: Any) -> Float[Array, "b h r d"]:
        x = placed(parts(q), sums[0], q.dim)
        return x if sums[1] is None else x + sums[1] * mean(q)

    return Rule(
        prepare=prepare,
        scores=scores,
        weigh=weigh,
        restore=restore,
        lay_out=lambda q, codes, transposed: (TokenArray.of(stream(q, codes), axis=3),),
        in_integers=lambda q: True,
        width=lambda q: 1,
    )


def _of_trellis(q: Trellis, codes: Codes) -> UInt8[Array, "b h bytes t"]:
    """A lane of `packing` is the codes of eight coordinates that follow on each other."""
    lanes = packing.unpack_lanes(codes, q.bits, -(-q.dim // 8))
    octets = lax.bitcast_convert_type(lanes, jnp.uint8)[..., : q.bits]
    return jnp.swapaxes(octets.reshape(*lanes.shape[:-1], -1), 2, 3)


def _trellis_ends(q: Trellis) -> np.ndarray:
    plane, lane = np.divmod(np.arange(q.dim), -(-q.dim // 8))
    return (8 * lane + plane + 1) * q.bits


_TRELLIS = of_streams(
    stream=_of_trellis,
    parts=lambda q: [
        Part(slice(0, q.dim), _trellis_ends(q), jnp.broadcast_to(q.table.step, q.dim), q.table, fine=False)
    ],
    mean=lambda q: None,
)


def _trellis_parts(q: TrellisColumns) -> list[Part]:
    ends = streams.closed_ends(q.widths)
    return [
        Part(some, ends[some], q.deviation[some] * table.step, table, fine=not table.whole) for table, some in q.parts
    ]


def _level_parts(q: Columns) -> list[Part]:
    found, start, ends = [], 0, np.cumsum(q.active)
    for levels in q.levels:
        assert isinstance(levels, Whole)
        size, bits = levels.shape[1], (levels.shape[0] - 1).bit_length()
        some = slice(start, start + size)
        if bits:
            of = functools.partial(_of_rows, bits, levels.levels)
            found.append(Part(some, ends[some], levels.step, of, levels.levels.dtype == jnp.int16, bits))
        start = some.stop
    return found


def parts_of(q: TrellisColumns | Columns) -> list[Part]:
    """Of a transform code."""
    return _trellis_parts(q) if isinstance(q, TrellisColumns) else _level_parts(q)


def mean_of(q: TrellisColumns | Columns) -> Float[Array, "d"]:
    """Of a transform code, what is added to its levels."""
    if isinstance(q, TrellisColumns):
        return q.mean
    return jnp.concatenate([levels.center for levels in q.levels if isinstance(levels, Whole)])


def _of_rows(
    bits: int, levels: Shaped[Array | np.ndarray, "k n"], windows: UInt8[Array, "b h n t"]
) -> Shaped[Array, "b h n t"]:
    indices = windows >> (8 - bits)
    if len(levels) <= SELECTED:
        return look_up(indices, jnp.asarray(levels)[..., None])
    return jax.vmap(lambda row, index: row[index], (1, 2), 2)(jnp.asarray(levels), indices)


RULES[Trellis] = lambda q: _TRELLIS if q.companded else _STATES if q.table.whole else DECODED
_STATES = Rule(
    prepare=lambda q, y: integers.query_limbs(y),
    scores=lambda q, y, codes, transposed: integers.products(y, q.table(q.states(codes))) * q.table.step,
    weigh=lambda q, w, codes: integers.sums(w, jnp.swapaxes(q.table(q.states(codes)), 2, 3)) * q.table.step,
    in_integers=lambda q: True,
)
_TRELLIS_COLUMNS = of_streams(
    stream=lambda q, codes: streams.closed(jnp.swapaxes(codes, 2, 3), int(q.widths.sum())),
    parts=parts_of,
    mean=mean_of,
)
RULES[TrellisColumns] = lambda q: _TRELLIS_COLUMNS if q.companded and q.streamed else DECODED
_COLUMNS = of_streams(
    stream=lambda q, codes: jnp.swapaxes(codes, 2, 3),
    parts=parts_of,
    mean=mean_of,
)
RULES[Columns] = lambda q: _COLUMNS if q.bits[0] and all(isinstance(levels, Whole) for levels in q.levels) else DECODED
RULES[NestedE8] = of_streams(
    stream=lambda q, codes: jnp.swapaxes(codes, 2, 3),
    parts=lambda q: [Part(slice(0, q.dim), q.ends, jnp.broadcast_to(q.unit, q.dim), q.levels, fine=q.fine)],
    mean=lambda q: None,
)._replace(width=lambda q: 4)  # with what the points of a block are made of
