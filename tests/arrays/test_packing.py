"""Packing is exact for every width and length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rqjax.arrays import packing


@functools.partial(jax.jit, static_argnums=1)
def through(indices, bits):
    """Words and stream of indices, and the indices unpacked from them."""
    words, stream, dim = packing.pack(indices, bits), packing.pack_stream(indices, bits), indices.shape[-1]
    return words, packing.unpack(words, bits, dim), stream, packing.unpack_stream(stream, bits, dim)


@settings(max_examples=25, deadline=None)
@given(bits=st.integers(1, 8), dim=st.integers(1, 70), seed=st.integers(0, 99), rows=st.integers(0, 3))
def test_round_trip(bits, dim, seed, rows):
    indices = np.random.default_rng(seed).integers(0, 2**bits, (rows, 2, dim))
    words, unpacked, stream, unstreamed = through(indices, bits)
    assert words.dtype == jnp.uint32
    assert words.shape == (rows, 2, packing.words_per_vector(dim, bits))
    assert words.shape[-1] <= -(-dim * bits // 32) + (dim % 8 > 0) * (1 + (bits > 4))
    np.testing.assert_array_equal(unpacked, indices)
    assert stream.shape == (rows, 2, -(-dim * bits // 32))
    np.testing.assert_array_equal(unstreamed, indices)


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_cost_what_they_say(bits):
    for dim in (32, 64, 96, 128, 192, 256, 576, 4096):
        assert 32 * packing.words_per_vector(dim, bits) == dim * bits


@pytest.mark.parametrize(("dim", "bits"), [(32, 1), (96, 1), (16, 2), (80, 2), (8, 4), (200, 4)])
def test_octets_are_in_their_order(dim, bits):
    indices = np.random.default_rng(dim).integers(0, 2**bits, (3, dim))
    octets = packing.unpack_octets(packing.pack(jnp.asarray(indices), bits), bits)
    np.testing.assert_array_equal(octets, indices[:, packing.octet_order(dim, bits)])


@pytest.mark.parametrize(("dim", "bits"), [(128, 3), (40, 1), (8, 2), (12, 4), (128, 8)])
def test_other_shapes_have_no_octet_order(dim, bits):
    assert packing.octet_order(dim, bits) is None


def test_layout_of_planes():
    """Index k L + j is field k of lane j; at 3 bits the last quarter of the lanes fills the high bytes."""
    indices = np.random.default_rng(0).integers(0, 8, 128)
    lanes = [sum(int(indices[k * 16 + j]) << (3 * k) for k in range(8)) for j in range(16)]
    expected = [lanes[j] | ((lanes[12 + j % 4] >> (8 * (j // 4)) & 255) << 24) for j in range(12)]
    np.testing.assert_array_equal(packing.pack(jnp.asarray(indices), 3), np.array(expected, np.uint32))


def test_layout_of_the_stream():
    indices = np.random.default_rng(0).integers(0, 32, 64)
    number = sum(int(index) << (5 * i) for i, index in enumerate(indices))
    expected = [number >> (32 * i) & 0xFFFFFFFF for i in range(10)]
    np.testing.assert_array_equal(packing.pack_stream(jnp.asarray(indices), 5), np.array(expected, np.uint32))


@pytest.mark.parametrize("bits", [0, 9, -1, True])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match="expected bits to be a whole number from 1 to 8, got"):
        packing.pack(jnp.zeros((1, 8), jnp.uint32), bits)
