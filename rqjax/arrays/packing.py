"""Packing of b-bit indices into uint32 words: b bits cost b bits, for every b.

Two layouts fill words, and a third fills bytes with indices of one or several widths. The first two take exactly d b
bits where 8 divides d and 32 divides d b. Otherwise the last word is padded; where 8 does not divide d, `pack` may take
one word more, above 4 bits two.

`pack` is the fast one. It cuts the d indices of a vector into 8 planes of L = ceil(d / 8) lanes; index k L + j is field
k of lane j. Every shift then acts on whole contiguous planes, and nothing is gathered. For b <= 4 a lane is b bytes.
The W words have the first W = ceil(L b / 4) lanes as their low bytes. The bytes of the other L - W lanes fill the high
bytes that are left. For b > 4 the low four bits of the indices are packed first, the rest behind them.

`pack_stream` has MLX's layout: index i takes the b bits from bit i b on of one little-endian stream.

`pack_bytes` takes the lowest bits of all indices, then their second bits, and so on, rounded up to whole bytes.
"""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Integer, UInt8, UInt32

from rqjax.arrays.planes import materialized, pad_to, planes
from rqjax.core import check_int


def words_per_vector(dim: int, bits: int) -> int:
    """uint32 words that `pack` and `pack_stream` use for `dim` indices of `bits` bits."""
    if bits > 4:
        return words_per_vector(dim, 4) + words_per_vector(dim, bits - 4)
    return -(-(-(-dim // 8) * bits) // 4)


def pack(indices: Integer[Array, "*n d"], bits: int) -> UInt32[Array, "*n words"]:
    """Packs indices below 2**bits, 1 <= bits <= 8, in the layout of planes."""
    return pack_planes(planes(indices.astype(jnp.uint32)), check_int("bits", bits, 1, 8))


def pack_planes(fields: list[UInt32[Array, "*n lanes"]], bits: int) -> UInt32[Array, "*n words"]:
    """`pack` for indices that are already in 8 planes."""
    if bits > 4:
        parts = [([f & 15 for f in fields], 4), ([f >> 4 for f in fields], bits - 4)]
        return jnp.concatenate([pack_planes(part, b) for part, b in parts], axis=-1)
    lanes = fields[0]
    for k in range(1, 8):
        lanes = lanes | (fields[k] << (bits * k))
    if bits == 4:
        return lanes
    lanes = materialized(lanes)  # packing 32 MiB takes a CPU 3 ms; fused into what follows, 24 ms
    size = -(-lanes.shape[-1] * bits // 4)
    words, rest = lanes[..., :size], lanes[..., size:]
    if bits == 3:  # three bytes of each lane that is left over go to three words
        extra = jnp.concatenate([(rest >> shift) & 255 for shift in (0, 8, 16)], axis=-1)
        return words | (pad_to(extra, size) << 24)
    for k in range(1, 4 // bits):
        words = words | (pad_to(rest[..., (k - 1) * size : k * size], size) << (8 * bits * k))
    return words


def check_width(codes: UInt32[Array, "*n w"] | UInt8[Array, "*n w"], width: int) -> None:
    """Raises a ValueError for codes that are not of `width` words or bytes a vector."""
    if codes.shape[-1] != width:
        raise ValueError(f"expected codes of {width} {codes.dtype} a vector, got shape {codes.shape}")


def unpack(words: UInt32[Array, "*n words"], bits: int, dim: int) -> UInt32[Array, "*n d"]:
    """The inverse of `pack`."""
    bits, lanes = check_int("bits", bits, 1, 8), -(-dim // 8)
    check_width(words, words_per_vector(dim, bits))
    if bits > 4:
        low = words_per_vector(dim, 4)
        return unpack(words[..., :low], 4, dim) | (unpack(words[..., low:], bits - 4, dim) << 4)
    shifts = bits * jnp.arange(8, dtype=jnp.uint32)[:, None]
    fields = (unpack_lanes(words, bits, lanes)[..., None, :] >> shifts) & ((1 << bits) - 1)
    return fields.reshape(*words.shape[:-1], 8 * lanes)[..., :dim]


def unpack_lanes(words: UInt32[Array, "*n words"], bits: int, lanes: int) -> UInt32[Array, "*n lanes"]:
    """The lanes of `pack`, 8 indices of at most 4 bits in each, the first lowest."""
    if bits == 4:
        return words
    mask = (1 << (8 * bits)) - 1
    if bits == 3:
        rest, extra = lanes - words.shape[-1], words >> 24
        extra = sum(extra[..., k * rest : (k + 1) * rest] << (8 * k) for k in range(3))
        words = jnp.concatenate([words & mask, extra], axis=-1)
    else:
        words = jnp.concatenate([(words >> (8 * bits * k)) & mask for k in range(4 // bits)], axis=-1)
    return materialized(words[..., :lanes])


def unpack_octets(words: UInt32[Array, "*n words"], bits: int) -> UInt8[Array, "*n d"]:
    """Unpacks indices of 1, 2 or 4 bits in the order in which they lie in the words, that of `octet_order`.

    A CPU unpacks four bytes in the time that `unpack` takes for a word.
    """
    octets = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
    return jnp.concatenate([(octets >> bits * k) & (2**bits - 1) for k in range(8 // bits)], axis=-1)


def octet_order(dim: int, bits: int) -> Int[np.ndarray, "d"] | None:
    """The coordinate of each index of `unpack_octets`; None where some lie across bytes, or words are padded."""
    if bits not in (1, 2, 4) or dim % 8 or dim * bits % 32:
        return None
    bytes_of_lanes = np.arange(dim).reshape(bits, 8 // bits, 4 // bits, -1)  # by byte, field, group of lanes, word
    return bytes_of_lanes.transpose(1, 3, 2, 0).ravel()


def pack_stream(indices: Integer[Array, "*n d"], bits: int) -> UInt32[Array, "*n words"]:
    """Packs indices below 2**bits, 1 <= bits <= 8, as one little-endian bit stream (the layout of `mx.quantize`)."""
    bits, dim = check_int("bits", bits, 1, 8), indices.shape[-1]
    size = -(-dim * bits // 32)
    bit = (indices.astype(jnp.uint32)[..., None] >> jnp.arange(bits, dtype=jnp.uint32)) & 1
    bit = pad_to(bit.reshape(*indices.shape[:-1], dim * bits), 32 * size)
    bit = bit.reshape(*indices.shape[:-1], size, 32)
    return (bit << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def unpack_stream(words: UInt32[Array, "*n words"], bits: int, dim: int) -> UInt32[Array, "*n d"]:
    """The inverse of `pack_stream`."""
    check_width(words, -(-dim * bits // 32))
    bit = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bit = bit.reshape(*words.shape[:-1], 32 * words.shape[-1])[..., : dim * bits]
    bit = bit.reshape(*words.shape[:-1], dim, bits)
    return (bit << jnp.arange(bits, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)


def pack_bytes(indices: Integer[Array, "*n d"], bits: int) -> UInt8[Array, "*n bytes"]:
    """Packs indices: the lowest bit of each, then the second bit of each, and so on."""
    planes = (indices[..., None, :] >> jnp.arange(bits, dtype=indices.dtype)[:, None]) & 1
    stream = planes.astype(jnp.uint8).reshape(*indices.shape[:-1], bits * indices.shape[-1])
    parts = jnp.split(pad_to(stream, -(-stream.shape[-1] // 8) * 8), 8, axis=-1)
    return functools.reduce(operator.or_, (part << k for k, part in enumerate(parts)))


def unpack_bytes(codes: UInt8[Array, "*n bytes"], bits: int, dim: int) -> UInt32[Array, "*n d"]:
    """The inverse of `pack_bytes`."""
    check_width(codes, -(-bits * dim // 8))
    stream = jnp.concatenate([(codes >> k) & 1 for k in range(8)], axis=-1)[..., : bits * dim]
    planes = stream.reshape(*codes.shape[:-1], bits, dim).astype(jnp.uint32)
    return (planes << jnp.arange(bits, dtype=jnp.uint32)[:, None]).sum(-2, dtype=jnp.uint32)
