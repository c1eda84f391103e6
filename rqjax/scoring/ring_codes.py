"""Quantizers whose codes a cache holds as streams of bits: trellises, lattices, levels of one coordinate each.

Coordinates come in parts whose levels are made alike. A coordinate's own scale is multiplied into queries and sums; all
parts share the limbs of queries and of weights.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped, UInt8

from rqjax.arrays import streams
from rqjax.arrays.blocks import inner
from rqjax.arrays.planes import materialized
from rqjax.core import Codes, Quantizer, TokenArray, pytree
from rqjax.core.products import full_precision_einsum
from rqjax.scoring import integers


class Part(NamedTuple):
    """Coordinates whose levels are whole numbers, times a factor of each."""

    coordinates: slice | np.ndarray
    ends: np.ndarray
    """Ends in the stream of the codes that levels are made of."""
    factors: Float[Array | np.ndarray, "n"]
    levels: Callable[[UInt8[Array, "b h codes t"]], Shaped[Array, "b h n t"]]
    """Makes levels of the windows of the codes: in int8, or if they are `fine` in int16."""
    fine: bool
    bits: int | None = None
    """Bits of an index, the highest of a window, where each coordinate has levels of its own; None if all share those
    of the states."""

    @property
    def units(self) -> list[Float[Array | np.ndarray, "n"]]:
        """Units of the limbs, those of the high ones first."""
        return [256 * self.factors, self.factors] if self.fine else [self.factors]

    def limbs(self, windows: UInt8[Array, "b h codes t"]) -> list[Int8[Array, "b h n t"]]:
        if not self.fine:
            return [self.levels(windows)]
        levels = materialized(self.levels(windows))
        return [((levels + 128) >> 8).astype(jnp.int8), lax.bitcast_convert_type(levels.astype(jnp.uint8), jnp.int8)]

    @property
    def tables(self) -> list[Int8[Array, "n levels"]]:
        """Tables for each unit: the levels of every index, of each coordinate or, n = 1, of all."""
        bits = streams.WINDOW if self.bits is None else self.bits
        windows = jnp.arange(2**bits, dtype=jnp.uint8) << (streams.WINDOW - bits)
        rows = 1 if self.bits is None else len(self.ends)
        return [x[0, 0] for x in self.limbs(jnp.broadcast_to(windows, (1, 1, rows, 2**bits)))]


def scaled(several: Sequence[Part], y: Float[Array, "b h r d"]) -> Float[Array, "b h r columns"]:
    """Scales queries for products with the limbs of all parts."""
    return jnp.concatenate([y[..., part.coordinates] * unit for part in several for unit in part.units], axis=-1)


def placed(several: Sequence[Part], sums: Float[Array, "b h r columns"], dim: int) -> Float[Array, "b h r d"]:
    """Converts sums of the limbs of all parts to sums of vectors."""
    x, start = jnp.zeros((*sums.shape[:-1], dim)), 0
    for part in several:
        for unit in part.units:
            x = x.at[..., part.coordinates].add(sums[..., start : start + len(unit)] * unit)
            start += len(unit)
    return x


@pytree
class Stream:
    """Codes as a cache holds them, in the layout of `arrays.streams`."""

    array: Any


class RingCodes(Quantizer):
    """A quantizer of `parts`, plus a `center`. Codes (b, h, t) are one array. If products are taken `in_integers`,
    `stream` makes a cache's array of it; else it stays as it is."""

    @property
    def parts(self) -> Sequence[Part]:
        """Parts of all coordinates with bits; those without come last and are left out."""
        raise NotImplementedError

    @property
    def center(self) -> Float[Array, "d"] | None:
        """Vector that is added to the levels of each vector."""
        return None

    def stream(self, codes: Codes) -> UInt8[Array, "b h rows t"]:
        """The stream of codes as `encode` returns them."""
        raise NotImplementedError

    @property
    def width(self) -> int:
        return 1 if self.in_integers else super().width

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        if not self.in_integers:
            return super().laid_out(codes, transposed)
        return Stream(TokenArray.of(self.stream(codes), axis=3))

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        if not self.in_integers:
            return super().prepare(y)
        center = self.center
        return integers.query_limbs(scaled(self.parts, y)), None if center is None else inner(y, center)[..., None]

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        if not self.in_integers:  # decoded once: a product may decode each coordinate as often as it reads it
            return full_precision_einsum("bhrd,bhtd->bhrt", prepared, materialized(self.decode(codes)))
        found = integers.row_products(prepared[0], self._rows(codes))
        return found if prepared[1] is None else found + prepared[1]

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        if not self.in_integers:
            return super().weigh(w, codes)
        return integers.sums(w, self._rows(codes)), None if self.center is None else w.sum(-1, keepdims=True)

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        if not self.in_integers:
            return super().restore(sums)
        x = placed(self.parts, sums[0], self.dim)
        return x if self.center is None else x + sums[1] * self.center

    def _rows(self, codes: Codes) -> Int8[Array, "b h n t"]:
        """The levels of all parts, for one product: the products of parts would take twice as long."""
        parts, laid_out = self.parts, isinstance(codes, Stream)
        bits = codes.array if laid_out else self.stream(codes)
        bits = bits if laid_out and len(parts) == 1 else materialized(bits)
        found = [part.limbs(streams.windows(bits, part.ends)) for part in parts]
        return jnp.concatenate(list(itertools.chain(*found)), axis=2)
