"""The layout of codes in a cache: tiles of bytes that integer dot products, on a CPU or a GPU, read as they are.

A cache holds codes of tokens on heads, written `UNIT` tokens at a time. Quantizers whose codes are plain indices of
levels in int8 (`Scalar`, `Affine`, `Sign`) are stored as tiles of indices; the codes of any other are stored as they are.

- Keys: (batch, heads, units, UNIT b / 8, d). Bytes of dimension j stand below each other, the dot product runs along d.
- Values, transposed: (batch, heads, d b / 8, tokens). The dot product runs along the tokens.
- Norms and scales: (batch, heads, tokens) and (batch, heads, groups, tokens).

The b bits of an index are split into fields of 4, 2 and 1 bits (3 = 2 + 1). The R rows of a tile share bytes: a byte of
the w-bit section holds w bits of rows i, i + R w / 8, i + 2 R w / 8, ..., so that unpacking shifts whole rows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int8, Integer, Shaped, UInt8

from rqjax.affine import Affine
from rqjax.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
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
    """An array along one of whose axes time runs, `per` tokens an entry."""

    array: Shaped[Array, "..."]
    axis: int = static()
    per: int = static(default=1)

    def tokens(self, count: int) -> "Timed":
        """Zeros in its form for `count` tokens."""
        shape = [*self.array.shape]
        shape[self.axis] = count // self.per
        return Timed(jnp.zeros(shape, self.array.dtype), self.axis, self.per)

    def read(self, start: Int[Array, ""] | int, count: int) -> Shaped[Array, "..."]:
        """The entries of `count` tokens from token `start` on."""
        return lax.dynamic_slice_in_dim(self.array, start // self.per, count // self.per, self.axis)

    def write(self, new: "Timed", start: Int[Array, "batch"], active: Shaped[Array, "batch"]) -> "Timed":
        """`new` from token `start[b]` on for each sequence b (axis 0) that is active; the others keep what they have."""

        def one(old, new, start, active):
            at = [0] * old.ndim
            at[self.axis - 1] = start // self.per
            kept = lax.dynamic_slice(old, at, new.shape)
            return lax.dynamic_update_slice(old, jnp.where(active, new, kept), at)

        return Timed(jax.vmap(one)(self.array, new.array, start, active), self.axis, self.per)

    def extend(self, count: int) -> "Timed":
        """Room for `count` more tokens."""
        widths = [(0, 0)] * self.array.ndim
        widths[self.axis] = (0, count // self.per)
        return Timed(jnp.pad(self.array, widths), self.axis, self.per)


def is_timed(x: Any) -> bool:
    return isinstance(x, Timed)


def has_indices(quantizer: Quantizer) -> bool:
    """Whether the codes of a quantizer are plain indices of levels in int8."""
    match quantizer:
        case Scalar():
            return quantizer.levels.dtype == jnp.int8 and quantizer.bits <= 4
        case Affine() | Sign():
            return True
    return False


def lay_out(quantizer: Quantizer, codes: Codes, *, transposed: bool) -> Codes:
    """Codes of (batch, heads, tokens) vectors, a multiple of UNIT tokens, in the layout of keys or of values.

    The nest stays that of the codes; each array becomes a `Timed`.
    """

    def part(quantizer, codes):
        return lay_out(quantizer, codes, transposed=transposed)

    def tile(indices, bits):
        batch, heads, time, dim = indices.shape
        if transposed:
            return Timed(pack_rows(jnp.swapaxes(indices, 2, 3), bits), axis=3)
        return Timed(pack_rows(indices.reshape(batch, heads, -1, UNIT, dim), bits), axis=2, per=UNIT)

    match quantizer:
        case Normalized() | Scaled():
            return Timed(codes[0], axis=2), part(quantizer.inner, codes[1])
        case Rotated() | Centered():
            return part(quantizer.inner, codes)
        case Residual():
            return part(quantizer.first, codes[0]), part(quantizer.second, codes[1])
        case Split():
            return tuple(map(part, quantizer.parts, codes))
        case Affine():
            scales, biases = (Timed(jnp.swapaxes(code, 2, 3), axis=3) for code in codes[1:])
            return tile(quantizer.indices(codes), quantizer.bits), scales, biases
        case Sign():
            return Timed(codes[0], axis=2), tile(quantizer.indices(codes), 1)
        case Scalar() if has_indices(quantizer):
            return tile(quantizer.indices(codes), quantizer.bits)
    return jax.tree.map(lambda leaf: Timed(leaf, axis=2), codes)


def pack_rows(indices: Integer[Array, "*n rows cols"], bits: int) -> UInt8[Array, "*n packed cols"]:
    """Packs indices below 2**bits, 1 <= bits <= 8, of a tile: ceil(rows / 8) bits rows of bytes."""
    missing = -indices.shape[-2] % 8
    indices = jnp.pad(indices, [(0, 0)] * (indices.ndim - 2) + [(0, missing), (0, 0)]).astype(jnp.uint8)
    sections, below = [], 0
    for width in _widths(bits):
        field = (indices >> below) & (2**width - 1)
        field = field.reshape(*field.shape[:-2], 8 // width, -1, field.shape[-1])
        shifts = width * jnp.arange(8 // width, dtype=jnp.uint8)[:, None, None]
        sections.append((field << shifts).sum(-3, dtype=jnp.uint8))
        below += width
    return jnp.concatenate(sections, axis=-2)


def unpack_rows(packed: UInt8[Array, "*n packed cols"], bits: int, rows: int) -> UInt8[Array, "*n rows cols"]:
    """The inverse of `pack_rows`."""
    *lead, size, cols = packed.shape
    eighth, below, first, indices = size // bits, 0, 0, None
    for width in _widths(bits):
        section = packed[..., first : first + width * eighth, :].reshape(*lead, 1, width * eighth, cols)
        shifts = width * jnp.arange(8 // width, dtype=jnp.uint8)[:, None, None]
        field = ((section >> shifts) & (2**width - 1)) << below
        field = field.reshape(*lead, 8 * eighth, cols)
        indices = field if indices is None else indices | field
        below, first = below + width, first + width * eighth
    assert indices is not None
    return indices[..., :rows, :]


def look_up(indices: UInt8[Array, "..."], levels: Int8[Array, "k"], *, symmetric: bool = False) -> Int8[Array, "..."]:
    """`levels[indices]` by selections, which a CPU vectorises where it would not vectorise a gather."""
    if symmetric:
        half = levels.shape[0] // 2
        negative = indices < half
        magnitude = look_up(jnp.where(negative, half - 1 - indices, indices - half), levels[half:])
        return jnp.where(negative, -magnitude, magnitude)
    if levels.shape[0] == 1:
        return jnp.broadcast_to(levels[0], indices.shape)
    half = levels.shape[0] // 2
    return jnp.where((indices & half) != 0, look_up(indices, levels[half:]), look_up(indices, levels[:half]))


def _widths(bits: int) -> list[int]:
    return [width for width in (8, 4, 2, 1) if bits & width]
