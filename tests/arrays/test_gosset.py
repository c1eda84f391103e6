import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rqjax.arrays.gosset import residues

CORNERS = np.array(list(itertools.product((0, 1), repeat=8)))


def nearest(y):
    """The nearest point of E8 by trying both neighbors of each coordinate, and those beside the nearest."""
    points = []
    for shift in (0, 0.5):
        around = np.floor(y - shift) + CORNERS + shift
        further = np.round(y - shift) + shift + np.concatenate([np.eye(8), -np.eye(8)])
        points += [p for p in np.concatenate([around, further]) if p.sum() % 2 == 0]
    return min(((y - p) ** 2).sum() for p in points)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int16])
def test_residues_are_those_of_the_nearest_point(dtype):
    unit = 1 if dtype == jnp.float32 else 16
    y = np.random.default_rng(0).normal(size=(50, 8)) * 2 * unit
    y = y if dtype == jnp.float32 else np.round(y)
    whole = [jnp.floor(jnp.asarray(v) / unit + 0.5).astype(jnp.int32 if unit == 1 else jnp.int16) for v in y.T]
    rest = np.stack(jax.jit(residues, static_argnums=2)([jnp.asarray(v, dtype) for v in y.T], whole, unit), 1)
    points = (y - rest) / unit
    np.testing.assert_allclose(points * 2, np.round(points * 2), atol=1e-5)
    odd = np.round(points * 2).astype(int) % 2
    assert (odd == odd[:, :1]).all()  # all whole, or all halves
    np.testing.assert_array_equal(np.round(points.sum(1)) % 2, 0)
    np.testing.assert_allclose(((y - points * unit) ** 2).sum(1) / unit**2, list(map(nearest, y / unit)), atol=1e-5)


def test_residues_of_lattice_points_are_zero():
    rng = np.random.default_rng(1)
    y = rng.integers(-5, 5, (100, 8)) + rng.integers(0, 2, (100, 1)) / 2
    y[:, 0] += y.sum(1) % 2
    rest = residues([jnp.asarray(v, jnp.float32) for v in y.T], [jnp.floor(v + 0.5).astype(int) for v in y.T], 1)
    np.testing.assert_array_equal(np.stack(rest), 0)
