"""The layout of codes in a cache: tiles of bytes that integer dot products, on a CPU or a GPU, read as they are.

A cache holds codes of tokens on heads, written `UNIT` tokens at a time. Codes that are plain indices of levels in int8
(of `Scalar` and `Affine`) are stored as tiles of indices, all others as they are. For a field of w bits:

- Keys, by token: (batch, heads, tokens w / 8, d), a unit behind the other. Dot products run along d.
- Values, transposed: (batch, heads, d w / 8, tokens). Dot products run along the tokens.
- Norms and scales: (batch, heads, tokens) and (batch, heads, groups, tokens).

The b bits of an index are split into fields of 8, 4, 2 and 1 bits (3 = 2 + 1), an array for each. The R rows of a tile
share bytes, so that unpacking shifts whole rows. A byte holds w bits of each of the rows i, i + R w / 8, i + 2 R w / 8,
and so on.
"""

import functools
import operator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Integer, UInt8

from rqjax.core import TokenArray, pytree

UNIT = 16
"""Tokens that are encoded together."""


@pytree
class KeyTile:
    """Indices of keys, by token: an array for each field."""

    sections: tuple[Any, ...]


@pytree
class ValueTile:
    """Indices of values, transposed: an array for each field."""

    sections: tuple[Any, ...]


def tile(indices: Integer[Array, "b h t d"], bits: int, *, transposed: bool) -> KeyTile | ValueTile:
    """Indices of (batch, heads, tokens) vectors, a multiple of UNIT tokens, as tiles of keys or of values."""
    if transposed:
        sections = pack_rows(jnp.swapaxes(indices, 2, 3), bits)
        return ValueTile(tuple(TokenArray.of(section, axis=3) for section in sections))
    batch, heads, _, dim = indices.shape
    sections = pack_rows(indices.reshape(batch, heads, -1, UNIT, dim), bits)
    return KeyTile(
        tuple(
            TokenArray.of(section.reshape(batch, heads, -1, dim), axis=2, tokens_per_entry=UNIT // section.shape[3])
            for section in sections
        )
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
