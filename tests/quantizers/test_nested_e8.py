import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.quantizers.nested_e8 import OFFSET, SCALES
from tests.tools.suites import some

pytestmark = pytest.mark.full

ROOTS = np.array(
    [
        a * np.eye(8)[i] + b * np.eye(8)[j]
        for i, j in itertools.combinations(range(8), 2)
        for a, b in itertools.product((-1, 1), repeat=2)
    ]
    + [np.array(signs) / 2 for signs in itertools.product((-1, 1), repeat=8) if np.prod(signs) > 0]
)
"""The 240 shortest points of E8, whose halfway planes bound the cell of the origin."""


def test_codes_are_all_points_of_the_cell():
    """Codes of 2 bits are 4^8 distinct points of E8 less the offset, within the cell of 4 E8 about the origin."""
    q = rqjax.NestedE8(jnp.float32(1), dim=8, bits=2)
    codes = np.arange(2**16, dtype=np.uint32)
    octets = np.stack([codes & 255, codes >> 8, np.zeros_like(codes)], axis=1).astype(np.uint8)
    points = np.asarray(q.decode(jnp.asarray(octets))) / SCALES[0]  # in halves
    assert len(np.unique(points, axis=0)) == 2**16
    assert (points @ ROOTS.T <= 2 * 4).all()
    doubled = points + OFFSET
    assert ((doubled % 2) == (doubled[:, :1] % 2)).all()
    assert (doubled.sum(1) % 4 == 0).all()


@pytest.mark.parametrize(("bits", "error"), some([(2, 1.744), (4, 1.604)], []))
def test_error_on_the_sphere(bits, error):
    """Errors have the known ratio to Shannon's bound at the bits stored, and are below those of Lloyd-Max levels."""
    x = jax.random.normal(jax.random.key(0), (8192, 128))
    x /= jnp.linalg.norm(x, axis=1, keepdims=True)
    q = rqjax.NestedE8.gaussian(128, bits, variance=1 / 128)
    assert q.bits_per_vector == 128 * (bits + 0.25)
    found = float(jnp.sum((q.decode(q.encode(x)) - x) ** 2, axis=1).mean()) * 4 ** (bits + 0.25)
    assert found == pytest.approx(error, rel=0.01)
    key = jax.random.key(1)
    rival = rqjax.eden(key, 128, bits + 0.25)
    lattice = rqjax.nested_e8(key, 128, bits)
    assert rival.bits_per_vector == lattice.bits_per_vector
    errors = [float(jnp.sum((r.decode(r.encode(x)) - x) ** 2)) for r in (lattice, rival)]
    assert errors[0] <= (0.79 if bits == 2 else 0.72) * errors[1]


@pytest.mark.parametrize("bits", [3, 7])
def test_what_was_decoded_is_encoded_without_error(bits):
    q = rqjax.NestedE8.gaussian(24, bits)
    x = q.decode(q.encode(jax.random.normal(jax.random.key(0), (5000, 24))))
    np.testing.assert_allclose(q.decode(q.encode(x)), x, atol=1e-5)


@pytest.mark.parametrize("bits", [2, 4])
def test_overloaded_vectors_are_shrunk(bits):
    """A point that is decoded on the far side of a cell would be twice as far away as 0."""
    q = rqjax.NestedE8.gaussian(8, bits)
    directions = jax.random.normal(jax.random.key(0), (1000, 8))
    x = directions / jnp.linalg.norm(directions, axis=1, keepdims=True) * jnp.linspace(1, 60, 1000)[:, None]
    decoded = q.decode(q.encode(x))
    assert (jnp.linalg.norm(decoded - x, axis=1) < 0.98 * jnp.linalg.norm(x, axis=1)).all()
    far = decoded[-100:]
    assert (jnp.sum(far * x[-100:], axis=1) > 0.5 * jnp.linalg.norm(far, axis=1) * 54).all()


def test_nested_e8_rejects_invalid_bits():
    for bits in (0, 9):
        with pytest.raises(ValueError, match="bits"):
            rqjax.nested_e8(jax.random.key(0), 64, bits)
