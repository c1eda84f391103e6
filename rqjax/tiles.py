"""The layout of codes in a cache: tiles of bytes that integer dot products, on a CPU or a GPU, read as they are.

A cache holds codes of tokens on heads, written `UNIT` tokens at a time. Quantizers whose codes are plain indices of
levels in int8 (`Scalar`, `Affine`, `Sign`) are stored as tiles of indices, those of any other as they are. For a field
of w bits:

- Keys, by token: (batch, heads, units, UNIT w / 8, d). Dot products run along d.
- Values, transposed: (batch, heads, d w / 8, tokens). Dot products run along the tokens.
- Norms and scales: (batch, heads, tokens) and (batch, heads, groups, tokens).

The b bits of an index are split into fields of 8, 4, 2 and 1 bits (3 = 2 + 1), an array for each. The R rows of a tile
share bytes: a byte holds w bits of each of the rows i, i + R w / 8, i + 2 R w / 8, ..., so that unpacking shifts whole
rows.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int8, Integer, Shaped, UInt8

from rqjax import mlx
from rqjax.affine import Affine
from rqjax.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
from rqjax.lanes import as_bits
from rqjax.per_head import PerHead, over_heads
from rqjax.pytree import pytree, static
from rqjax.quantizer import Codes, Quantizer
from rqjax.scalar import Scalar
from rqjax.sign import Sign

UNIT = 16
"""Tokens that are encoded together."""
BLOCK = 128
"""Tokens by which the capacity of a cache grows: what a GPU kernel takes at a time."""


@pytree
class Timed:
    """An array along one of whose axes time runs, `per` tokens an entry.

    It holds the bits of its numbers: XLA's CPU backend would write a bfloat16 by way of a float32 copy of the whole.
    """

    bits: Shaped[Array, "..."]
    axis: int = static()
    per: int = static()
    dtype: str = static()

    @classmethod
    def of(cls, x: Shaped[Array, "..."], axis: int, per: int = 1) -> "Timed":
        return cls(as_bits(x), axis, per, x.dtype.name)

    def empty(self, tokens: int) -> "Timed":
        """Zeros in its form."""
        shape = [*self.bits.shape]
        shape[self.axis] = tokens // self.per
        return dataclasses.replace(self, bits=jnp.zeros(shape, self.bits.dtype))

    def read(self, start: Int[Array, ""] | int, tokens: int) -> Shaped[Array, "..."]:
        """The entries of some tokens from token `start` on."""
        bits = lax.dynamic_slice_in_dim(self.bits, start // self.per, tokens // self.per, self.axis)
        return lax.bitcast_convert_type(bits, self.dtype)

    def write(self, new: "Timed", start: Int[Array, "batch"], active: Shaped[Array, "batch"]) -> "Timed":
        """With `new` from token `start[b]` on in each sequence b (axis 0) that is active."""

        def one(old, new, start, active):
            at = [jnp.zeros_like(start)] * old.ndim
            at[self.axis - 1] = start // self.per
            kept = lax.dynamic_slice(old, at, new.shape)
            return lax.dynamic_update_slice(old, jnp.where(active, new, kept), at)

        return dataclasses.replace(self, bits=jax.vmap(one)(self.bits, new.bits, start, active))

    def extend(self, tokens: int) -> "Timed":
        """Room for more tokens."""
        widths = [(0, 0)] * self.bits.ndim
        widths[self.axis] = (0, tokens // self.per)
        return dataclasses.replace(self, bits=jnp.pad(self.bits, widths))


def is_timed(x: Any) -> bool:
    return isinstance(x, Timed)


def has_indices(quantizer: Quantizer) -> bool:
    """Whether the codes of a quantizer are plain indices of levels in int8."""
    match quantizer:
        case Scalar():
            return quantizer.levels.dtype == jnp.int8 and quantizer.bits <= 4
        case Affine():
            return not mlx.stores(quantizer)
        case Sign():
            return True
    return False


def has_tiles(quantizer: Quantizer) -> bool:
    """Whether all codes of a quantizer are stored as tiles."""
    return every(quantizer, has_indices)


def every(quantizer: Quantizer, holds: Callable[[Quantizer], bool]) -> bool:
    """Whether something holds for each quantizer within the combinators of a nest."""
    match quantizer:
        case Normalized() | Scaled() | Rotated() | Centered() | PerHead():
            return every(quantizer.inner, holds)
        case Residual():
            return every(quantizer.first, holds) and every(quantizer.second, holds)
        case Split():
            return all(every(part, holds) for part in quantizer.parts)
    return holds(quantizer)


def lay_out(quantizer: Quantizer, codes: Codes, *, transposed: bool) -> Codes:
    """Codes of (batch, heads, tokens) vectors, a multiple of UNIT tokens, in the layout of keys or of values.

    The nest stays that of the codes; each array becomes a `Timed`.
    """

    def part(quantizer, codes):
        return lay_out(quantizer, codes, transposed=transposed)

    def tile(indices, bits):
        if transposed:
            return tuple(Timed.of(section, axis=3) for section in pack_rows(jnp.swapaxes(indices, 2, 3), bits))
        units = indices.reshape(*indices.shape[:2], -1, UNIT, indices.shape[3])
        return tuple(Timed.of(section, axis=2, per=UNIT) for section in pack_rows(units, bits))

    match quantizer:
        case PerHead():
            return over_heads(functools.partial(lay_out, transposed=transposed))(quantizer, codes)
        case Normalized() | Scaled():
            return Timed.of(codes[0], axis=2), part(quantizer.inner, codes[1])
        case Rotated() | Centered():
            return part(quantizer.inner, codes)
        case Residual():
            return part(quantizer.first, codes[0]), part(quantizer.second, codes[1])
        case Split():
            return tuple(map(part, quantizer.parts, codes))
        case Affine() if has_indices(quantizer):
            scales, biases = (Timed.of(jnp.swapaxes(code, 2, 3), axis=3) for code in codes[1:])
            return tile(quantizer.indices(codes), quantizer.bits), scales, biases
        case Sign():
            return Timed.of(codes[0], axis=2), tile(quantizer.indices(codes), 1)
        case Scalar() if has_indices(quantizer):
            return tile(quantizer.indices(codes), quantizer.bits)
    return jax.tree.map(lambda leaf: Timed.of(leaf, axis=2), codes)


def pack_rows(indices: Integer[Array, "*n rows cols"], bits: int) -> tuple[UInt8[Array, "*n packed cols"], ...]:
    """Packs the indices of a tile, below 2**bits, 1 <= bits <= 8: ceil(rows / 8) w rows of bytes for w bits."""
    missing = -indices.shape[-2] % 8
    indices = jnp.pad(indices, [(0, 0)] * (indices.ndim - 2) + [(0, missing), (0, 0)]).astype(jnp.uint8)

    def section(width, below):
        field = (indices >> below) & (2**width - 1)
        field = field.reshape(*field.shape[:-2], 8 // width, -1, field.shape[-1])
        return (field << _shifts(width)).sum(-3, dtype=jnp.uint8)

    return tuple(section(*field) for field in _fields(bits))


def unpack_rows(sections: tuple[UInt8[Array, "..."], ...], bits: int, rows: int) -> UInt8[Array, "*n rows cols"]:
    """The inverse of `pack_rows`."""

    def field(section, width, below):
        values = ((section[..., None, :, :] >> _shifts(width)) & (2**width - 1)) << below
        return values.reshape(*section.shape[:-2], -1, section.shape[-1])[..., :rows, :]

    parts = [field(section, *place) for section, place in zip(sections, _fields(bits), strict=True)]
    return functools.reduce(operator.or_, parts)


def look_up(indices: UInt8[Array, "..."], levels: Int8[Array, "k"], *, symmetric: bool = False) -> Int8[Array, "..."]:
    """`levels[indices]` by selections, which a CPU vectorises where it would not vectorise a gather."""
    if symmetric:
        half = levels.shape[0] // 2
        flip = (indices >= half).astype(jnp.uint8) - 1  # all bits set below the middle
        sign = lax.bitcast_convert_type(flip, jnp.int8)
        return (look_up(indices ^ flip, levels[half:]) ^ sign) - sign
    if levels.shape[0] == 1:
        return jnp.broadcast_to(levels[0], indices.shape)
    half = levels.shape[0] // 2
    return jnp.where((indices & half) != 0, look_up(indices, levels[half:]), look_up(indices, levels[:half]))


def _fields(bits: int) -> list[tuple[int, int]]:
    """Width of each field of an index, and the bits below it."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]


def _shifts(width: int) -> UInt8[Array, "fields 1 1"]:
    return width * jnp.arange(8 // width, dtype=jnp.uint8)[:, None, None]
