"""Streams of bits against strings of them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.arrays import streams, viterbi
from tests.tools.suites import some

BITS = [(3,) * 16, (1,) * 24, (8, 7, 5, 5, 4, 3, 3, 2, 1, 1, 1), (6, 2), (4,) * 5]


def codes(bits, count=20):
    return np.random.default_rng(0).integers(0, 2 ** np.array(bits), (count, len(bits))).astype(np.uint32)


def text(row, bits):
    """The stream as a string, the first bit first."""
    return "".join(format(code, f"0{b}b")[::-1] for code, b in zip(row, bits, strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_streams_are_the_codes_one_after_the_other(bits):
    x = codes(bits)
    packed = np.asarray(streams.pack_vectors(jnp.asarray(x), bits))
    assert packed.shape == (len(x), -(-sum(bits) // 8))
    for row, stream in zip(x, packed, strict=True):
        found = "".join(format(byte, "08b")[::-1] for byte in stream)
        assert found[: sum(bits)] == text(row, bits)
    np.testing.assert_array_equal(streams.unpack_vectors(jnp.asarray(packed), bits), x)


@pytest.mark.parametrize("bits", BITS)
def test_windows_are_the_last_eight_bits_of_the_ring(bits):
    x = codes(bits)
    found = np.asarray(streams.vector_windows(streams.pack_vectors(jnp.asarray(x), bits), bits))
    for row, windows in zip(x, found, strict=True):
        ring = text(row, bits)
        ends = np.cumsum(bits)
        expected = [int((ring + ring)[len(ring) + end - 8 : len(ring) + end][::-1], 2) for end in ends]
        assert windows.tolist() == expected
    np.testing.assert_array_equal(found, viterbi.windows(jnp.asarray(x), bits, 8))


def test_codes_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"expected codes of 6 uint8 a vector, got shape \(2, 5\)"):
        streams.unpack_vectors(jnp.zeros((2, 5), jnp.uint8), (3,) * 16)


MANY = [(8, 7, 6, 5, 4, 3, 3, 2, 1, 0, 0, 0), (3,) * 7 + (1,) * 4]
KINDS = [*itertools.product([rqjax.PerCoordinate, rqjax.TrellisPerCoordinate], MANY)]
KINDS += [(rqjax.TrellisPerCoordinate, (7.5, 2.5, 2.5, 2.5, 0.75))]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "bits"), some(KINDS, KINDS[1:2]))
def test_products_with_coordinates_of_many_bits(kind, bits):
    """Products in a cache equal decoded vectors': bits that fill no byte, fine levels, coordinates without bits."""
    d, keys = len(bits), jax.random.split(jax.random.key(0), 4)
    mean, deviation = 0.3 * jax.random.normal(keys[0], (d,)), jnp.exp(-jnp.arange(d) / 3)
    q = kind.gaussian(mean, deviation, bits)
    q = q.rounded() if kind is rqjax.PerCoordinate else q
    assert q.in_integers
    x = mean + deviation * jax.random.normal(keys[1], (2, 2, 32, d))
    y, w = jax.random.normal(keys[2], (2, 2, 3, d)), jax.random.uniform(keys[3], (2, 2, 3, 32))
    encoded, decoded = q.encode(x), np.asarray(q.decode(q.encode(x)))
    laid_out = jax.tree.map(lambda a: a.read(0, 32), q.laid_out(encoded, False), is_leaf=lambda a: hasattr(a, "read"))
    for held in (encoded, laid_out):
        scores = q.scores(q.prepare(y), held)
        sums = q.restore(q.weigh(w, held))
        # 15 bits of the largest product of a query's coordinate and its scale
        np.testing.assert_allclose(scores, np.einsum("bhrd,bhtd->bhrt", y, decoded), atol=3e-3)
        np.testing.assert_allclose(sums, np.einsum("bhrt,bhtd->bhrd", w, decoded), atol=1e-4)
