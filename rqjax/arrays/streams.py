"""Streams of bits: codes of a vector's coordinates one after another, each with its own number of bits.

The lowest bit of a code comes first. A window is the last eight bits up to the end of a code, the newest on top. It is
the state of a bit-shift trellis of 2^8 states; its highest bits are the code itself. The stream is a ring: the bits
before the first code are those at its end. Bytes are rows and vectors are lanes, so that whole rows are shifted. Where
neighbors in the stream are neighbors in a lane, a CPU takes three times as long.
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, UInt8

from rqjax.arrays.packing import check_width

WINDOW = 8
Bits = Sequence[int] | np.ndarray
"""Bits of each code, 1 to 8."""


def pack(codes: Integer[Array, "*n d t"], bits: Bits) -> UInt8[Array, "*n bytes t"]:
    """Packs codes as streams, rounded up to whole bytes."""
    each = np.asarray(bits, int)
    code = np.repeat(np.arange(len(each)), each)
    bit = np.arange(len(code)) - np.repeat(np.cumsum(each) - each, each)
    code, bit = (np.pad(x, (0, -len(code) % 8)) for x in (code, bit))
    found = (codes.astype(jnp.uint8)[..., code, :] >> bit.astype(np.uint8)[:, None]) & 1
    found = found.reshape(*found.shape[:-2], len(code) // 8, 8, found.shape[-1])
    return (found << jnp.arange(8, dtype=jnp.uint8)[:, None]).sum(-2, dtype=jnp.uint8)


def closed(stream: UInt8[Array, "*n bytes t"], total: int) -> UInt8[Array, "*n closed t"]:
    """Puts a copy of its last eight bits before a ring of `total` bits, unless these are whole bytes."""
    if total % 8 == 0:
        return stream
    return jnp.concatenate([windows(stream, np.array([total])), stream], axis=-2)


def closed_ends(bits: Bits) -> np.ndarray:
    """Ends of the codes in a closed ring, in bits."""
    return np.cumsum(bits) + (WINDOW if np.sum(bits) % 8 else 0)


def windows(stream: UInt8[Array, "*n bytes t"], ends: np.ndarray) -> UInt8[Array, "*n d t"]:
    """Windows of the codes that end at bits `ends` of the stream."""
    size = max(stream.shape[-2], 1)
    start = (ends - WINDOW) % (8 * size)
    first, shift = start // 8, (start % 8).astype(np.uint8)[:, None]
    low, high = stream[..., first, :], stream[..., (first + 1) % size, :]
    return (low >> shift) | ((high << (7 - shift)) << np.uint8(1))


def pack_vectors(codes: Integer[Array, "*n d"], bits: Bits) -> UInt8[Array, "*n bytes"]:
    """Packs each vector's codes as a stream."""
    return by_rows(lambda rows: pack(rows, bits), codes)


def unpack_vectors(stream: UInt8[Array, "*n bytes"], bits: Bits) -> UInt8[Array, "*n d"]:
    """The inverse of `pack_vectors`."""
    each = np.asarray(bits, int)
    check_width(stream, -(-int(each.sum()) // 8))
    unused = (WINDOW - each).astype(np.uint8)[:, None]
    return by_rows(lambda rows: windows(rows, np.cumsum(each)) >> unused, stream)


def vector_windows(stream: UInt8[Array, "*n bytes"], bits: Bits) -> UInt8[Array, "*n d"]:
    """The windows of each vector's ring."""
    check_width(stream, -(-int(np.sum(bits)) // 8))
    return by_rows(lambda rows: windows(closed(rows, int(np.sum(bits))), closed_ends(bits)), stream)


def by_rows(function: Callable[[Array], Array], x: Array) -> Array:
    """Applies a function of (rows, vectors) to vectors (*n, rows)."""
    found = function(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T).T
    return found.reshape(*x.shape[:-1], found.shape[-1])
