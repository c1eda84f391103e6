"""The layout of codes in a cache: tiles of bytes that integer dot products, on a CPU or a GPU, read as they are.

A cache holds codes of tokens on heads, written `UNIT` tokens at a time. Codes that are plain indices of levels in int8
(of `Scalar` and `Affine`) are stored as tiles of indices, all others as they are. For a field of w bits:

- Keys, by token: (batch, heads, tokens w / 8, d), a unit behind the other. Dot products run along d.
- Values, transposed: (batch, heads, d w / 8, tokens). Dot products run along the tokens.
- Norms and scales: (batch, heads, tokens) and (batch, heads, groups, tokens).

The b bits of an index are split into fields of 8, 4, 2 and 1 bits (3 = 2 + 1), an array for each. The R rows of a tile
share bytes: a byte holds w bits of each of the rows i, i + R w / 8, i + 2 R w / 8, ..., so that unpacking shifts whole
rows.
"""

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Integer, Shaped, UInt8

from rqjax.arrays.planes import as_bits
from rqjax.core import pytree, static

UNIT = 16
"""Tokens that are encoded together."""
PAGE = 128
"""Tokens by which the capacity of a cache grows: what a page holds, and what a GPU kernel takes at a time."""


@pytree
class TokenArray:
    """An array along one of whose axes time runs, `tokens_per_entry` to an entry.

    Of numbers of 16 bits it holds the bits: XLA's CPU backend would write a bfloat16 by way of a float32 copy of the
    whole, up to jaxlib 0.10.
    """

    bits: Shaped[Array, "..."]
    axis: int = static()
    tokens_per_entry: int = static()
    dtype: str = static()

    @classmethod
    def of(cls, x: Shaped[Array, "..."], axis: int, tokens_per_entry: int = 1) -> "TokenArray":
        return cls(as_bits(x) if x.dtype.itemsize == 2 else x, axis, tokens_per_entry, x.dtype.name)

    def empty(self, tokens: int) -> "TokenArray":
        """Zeros in its form."""
        shape = [*self.bits.shape]
        shape[self.axis] = tokens // self.tokens_per_entry
        return dataclasses.replace(self, bits=jnp.zeros(shape, self.bits.dtype))

    def read(
        self, start: Int[Array, ""] | int, tokens: int, tables: Int[Array, "batch pages"] | None = None
    ) -> Shaped[Array, "..."]:
        """The entries of some tokens from token `start` on: of sequences, or by their tables of pages, on axis 0."""
        entries, bits = tokens // self.tokens_per_entry, self.bits
        if tables is not None:
            bits = self._gathered(lax.dynamic_slice_in_dim(tables, start // PAGE, tokens // PAGE, 1))
        elif entries < bits.shape[self.axis]:  # a slice of all would still be a copy
            bits = lax.dynamic_slice_in_dim(bits, start // self.tokens_per_entry, entries, self.axis)
        return lax.bitcast_convert_type(bits, self.dtype)

    def _gathered(self, pages: Int[Array, "batch pages"]) -> Shaped[Array, "batch ..."]:
        """Pages side by side. Where tokens come last they are copied one by one: on a CPU a gather whose runs are short
        takes 20 times as long."""
        batch, count = pages.shape
        shape = [batch, *self.bits.shape[1:]]
        shape[self.axis] *= count
        if self.axis < self.bits.ndim - 1:
            return jnp.moveaxis(self.bits[jnp.maximum(pages, 0)], 1, self.axis).reshape(shape)

        def copied(i: Array, out: Array) -> Array:
            at = [i // count, *[jnp.zeros_like(i)] * (out.ndim - 1)]
            at[self.axis] = i % count * self.bits.shape[self.axis]
            page = lax.dynamic_slice_in_dim(self.bits, jnp.maximum(pages[i // count, i % count], 0), 1)
            return lax.dynamic_update_slice(out, page, at)

        return lax.fori_loop(0, batch * count, copied, jnp.zeros(shape, self.bits.dtype))

    def write(
        self,
        new: "TokenArray",
        start: Int[Array, "batch"],
        active: Shaped[Array, "batch"],
        tables: Int[Array, "batch pages"] | None = None,
    ) -> "TokenArray":
        """With `new`, within a page, from token `start[b]` on in each sequence b that is active."""

        def one(old, new, start, active, page=None):
            at = [jnp.zeros_like(start)] * new.ndim
            at[self.axis - 1] = start // self.tokens_per_entry
            if page is not None:
                at, new = [page, *at], new[None]
            kept = lax.dynamic_slice(old, at, new.shape)
            return lax.dynamic_update_slice(old, jnp.where(active, new, kept), at)

        if tables is None:
            bits = jax.vmap(one)(self.bits, new.bits, start, active)
        else:
            pages = jnp.maximum(jnp.take_along_axis(tables, start[:, None] // PAGE, axis=1)[:, 0], 0)
            at = lambda b, bits: one(bits, new.bits[b], start[b] % PAGE, active[b], pages[b])  # noqa: E731
            bits = lax.fori_loop(0, len(start), at, self.bits)
        return dataclasses.replace(self, bits=bits)

    def extend(self, tokens: int) -> "TokenArray":
        """Room for more tokens."""
        widths = [(0, 0)] * self.bits.ndim
        widths[self.axis] = (0, tokens // self.tokens_per_entry)
        return dataclasses.replace(self, bits=jnp.pad(self.bits, widths))


def is_token_array(x: Any) -> bool:
    return isinstance(x, TokenArray)


def tile(indices: Integer[Array, "b h t d"], bits: int, *, transposed: bool) -> tuple[TokenArray, ...]:
    """Indices of (batch, heads, tokens) vectors, a multiple of UNIT tokens, as tiles of keys or of values."""
    if transposed:
        return tuple(TokenArray.of(section, axis=3) for section in pack_rows(jnp.swapaxes(indices, 2, 3), bits))
    batch, heads, _, dim = indices.shape
    sections = pack_rows(indices.reshape(batch, heads, -1, UNIT, dim), bits)
    return tuple(
        TokenArray.of(section.reshape(batch, heads, -1, dim), axis=2, tokens_per_entry=UNIT // section.shape[3])
        for section in sections
    )


def key_indices(sections: tuple[UInt8[Array, "b h _ d"], ...], bits: int) -> UInt8[Array, "b h t d"]:
    """The indices of tiles of keys."""
    batch, heads, _, dim = sections[0].shape
    rows = [UNIT * width // 8 for width, _ in _fields(bits)]
    units = tuple(x.reshape(batch, heads, -1, n, dim) for x, n in zip(sections, rows, strict=True))
    return unpack_rows(units, bits, UNIT).reshape(batch, heads, -1, dim)


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


def _fields(bits: int) -> list[tuple[int, int]]:
    """Width of each field of an index, and the bits below it."""
    widths = [width for width in (8, 4, 2, 1) if bits & width]
    return [(width, sum(widths[:i])) for i, width in enumerate(widths)]


def _shifts(width: int) -> UInt8[Array, "fields 1 1"]:
    return width * jnp.arange(8 // width, dtype=jnp.uint8)[:, None, None]
