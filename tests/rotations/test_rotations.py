"""Rotations are isometries with their inverse, and what their names say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rqjax.rotations import (
    Chain,
    Dense,
    Givens,
    Hadamard,
    Identity,
    MultivectorRotor,
    Permutation,
    Quaternion,
    Rotor,
    StridedRotor,
    butterfly,
    orthogonality_error,
)
from rqjax.rotations.rotor import rotation_matrices
from tests.tools import clifford
from tests.tools.suites import some

DIMS = [2, 5, 80, 99, 100]
apply = jax.jit(lambda rotation, x: rotation(x))
invert = jax.jit(lambda rotation, y: rotation.inverse(y))


def chain(key, dim):
    keys = jax.random.split(key, 3)
    return Chain((Rotor.random(keys[0], dim), Permutation.random(keys[1], dim), Hadamard.random(keys[2], dim)))


MAKERS = {
    "identity": lambda key, dim: Identity(dim),
    "dense": Dense.haar,
    "hadamard": Hadamard.random,
    "rotor": Rotor.random,
    "quaternion": Quaternion.random,
    "givens": Givens.random,
    "permutation": Permutation.random,
    "strided": lambda key, dim: StridedRotor.random(key, dim, stride=3),
    "butterfly": butterfly,
    "klt": lambda key, dim: Dense.klt(jax.random.normal(key, (2 * dim, dim))),
    "chain": chain,
    "multivector": lambda key, dim: MultivectorRotor(Rotor.random(key, dim + -dim % 3).bivectors, dim=dim),
}


def matrix(rotation):
    """The rotation as a matrix: columns are images of the axes."""
    return np.asarray(apply(rotation, jnp.eye(rotation.dim))).T


WITHOUT_TAIL = {
    "identity": [80],
    "dense": [2, 80, 576],
    "permutation": [2, 80, 576],
    "hadamard": [3, 80, 100, 576],
    "klt": [5, 80],
    "butterfly": [2, 80, 128],
    "strided": [5, 11, 80],
}
"""Rotations that do not treat the last coordinates apart: fewer dimensions say as much."""
CASES = [(name, dim) for name in MAKERS for dim in WITHOUT_TAIL.get(name, DIMS)]


@pytest.mark.parametrize(("name", "dim"), some(CASES, [case for case in CASES if case[1] == 80]))
def test_isometry_with_inverse(name, dim):
    rotation = MAKERS[name](jax.random.key(dim), dim)
    assert rotation.dim == dim
    x = np.stack([np.eye(dim, dtype=np.float32), jax.random.normal(jax.random.key(1), (dim, dim))])
    y = np.asarray(apply(rotation, x))
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=3e-6)
    m = y[0].T
    np.testing.assert_allclose(m.T @ m, np.eye(dim), atol=3e-6)
    again, inverse = np.split(
        np.asarray(invert(rotation, np.concatenate([y[1], np.eye(len(m), dtype=np.float32)]))), [dim]
    )
    np.testing.assert_allclose(again, x[1], atol=max(5e-6, 1.2e-8 * dim))  # what sums of so many terms round to
    np.testing.assert_allclose(inverse, m, atol=1e-6)  # the inverse is the transpose


@pytest.mark.parametrize("dim", some(DIMS, [80]))
def test_rotor_is_the_clifford_sandwich(dim):
    rotor = Rotor.random(jax.random.key(dim), dim)
    x = jax.random.normal(jax.random.key(1), (4, dim))
    y = np.asarray(apply(rotor, x))
    multivectors = clifford.embed(x[:, rotor.groups], clifford.VECTOR)
    rotated = jax.jit(lambda b, x: clifford.sandwich(clifford.exp(b), x))(rotor.bivectors, multivectors)
    np.testing.assert_allclose(y[:, rotor.groups], rotated[..., np.array(clifford.VECTOR)], atol=2e-6)
    np.testing.assert_allclose(rotated[..., np.array([0, 3, 5, 6, 7])], 0, atol=2e-6)  # a rotor keeps grades
    left = sorted(set(range(dim)) - set(rotor.groups.ravel().tolist()))
    assert len(rotor.groups) == dim // 3
    assert len(left) == dim % 3
    assert rotor.tail.shape == (int(len(left) == 2),)
    np.testing.assert_allclose(np.linalg.norm(y[:, left], axis=-1), np.linalg.norm(x[:, left], axis=-1), rtol=1e-6)
    if len(left) == 2:
        angle = clifford.exp(jnp.array([rotor.tail[0], 0, 0]))
        planar = clifford.embed(jnp.pad(x[:, left], ((0, 0), (0, 1))), clifford.VECTOR)
        rotated = clifford.sandwich(angle, planar)[:, np.array(clifford.VECTOR[:2])]
        np.testing.assert_allclose(y[:, left], rotated, atol=2e-6)


@pytest.mark.full
def test_rotor_matrices_have_determinant_one_and_no_singularity():
    bivectors = jnp.concatenate([jax.random.normal(jax.random.key(0), (50, 3)) * 3, jnp.zeros((1, 3))])
    matrices = jnp.moveaxis(rotation_matrices(bivectors), -1, 0)
    np.testing.assert_allclose(jnp.linalg.det(matrices), 1, atol=1e-5)
    np.testing.assert_allclose(matrices[-1], np.eye(3))
    assert jnp.isfinite(jax.jit(jax.jacobian(rotation_matrices))(jnp.zeros((1, 3)))).all()


@pytest.mark.full
def test_random_rotors_are_haar():
    """Moments of Haar on SO(3): E R_ij^2 = 1/3, E R_ij^4 = 1/5, E tr R = 0, E (tr R)^2 = 1."""
    matrices = np.asarray(rotation_matrices(Rotor.random(jax.random.key(0), 3 * 60_000).bivectors))
    traces = np.trace(matrices)
    np.testing.assert_allclose((matrices**2).mean(-1), 1 / 3, atol=0.006)  # standard errors are 0.0013, 0.0011, 0.004
    np.testing.assert_allclose((matrices**4).mean(-1), 1 / 5, atol=0.006)
    assert abs(traces.mean()) < 0.015
    assert abs((traces**2).mean() - 1) < 0.02


def test_dense_is_haar():
    matrices = np.asarray(jax.vmap(lambda key: Dense.haar(key, 4).matrix)(jax.random.split(jax.random.key(0), 5000)))
    traces = np.trace(matrices, axis1=1, axis2=2)
    assert abs(traces.mean()) < 0.05
    assert abs((traces**2).mean() - 1) < 0.08
    np.testing.assert_allclose((matrices**2).mean(0), 1 / 4, atol=0.015)


def test_quaternions_multiply_from_both_sides():
    rotation = Quaternion.random(jax.random.key(0), 4)
    numbers = rotation.left[0], rotation.right[0], jax.random.normal(jax.random.key(1), (4,))
    p, q, x = (np.asarray(v, np.float64) for v in numbers)

    def times(a, b):
        scalar = a[0] * b[0] - a[1:] @ b[1:]
        return np.append(scalar, a[0] * b[1:] + b[0] * a[1:] + np.cross(a[1:], b[1:]))

    expected = times(times(p, x), q * np.array([1, -1, -1, -1])) / np.linalg.norm(p) / np.linalg.norm(q)
    np.testing.assert_allclose(rotation(jnp.asarray(x, jnp.float32)), expected, atol=1e-6)


@pytest.mark.parametrize("dim", some([2, 6, 12, 80, 96, 100, 101, 128, 192, 576], [12, 128]))
def test_hadamard_mixes_every_coordinate_with_every_other(dim):
    entries = np.abs(matrix(Hadamard.random(jax.random.key(0), dim))) * np.sqrt(dim)
    odd = dim // (dim & -dim)
    assert entries.min() > 0.9 / odd  # the Hartley factor's smallest entry is about pi / (2 m)
    assert entries.max() < np.sqrt(2) + 1e-5
    if odd == 1:
        np.testing.assert_allclose(entries, 1, atol=1e-5)


@pytest.mark.full
def test_rotor_equals_the_band_form_for_bfloat16():
    rotor = Rotor.random(jax.random.key(0), 128)
    x = jax.random.normal(jax.random.key(1), (10, 128)).astype(jnp.bfloat16)
    widened = apply(rotor, x.astype(jnp.float32))
    np.testing.assert_allclose(apply(rotor, x), widened, atol=5e-7)  # either may add by fused multiplications


def test_strided_rotor_is_the_clifford_sandwich():
    """A rotor of 17 coordinates 3 apart has whole groups, groups of two, and one coordinate that stays."""
    rotor, x = StridedRotor.random(jax.random.key(0), 17, stride=3), jax.random.normal(jax.random.key(1), (4, 17))
    y = np.asarray(apply(rotor, x))
    assert rotor.groups.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8], *[[9, 12, 15], [10, 13, 16]]]
    multivectors = clifford.embed(x[:, rotor.groups], clifford.VECTOR)
    rotated = jax.jit(lambda b, x: clifford.sandwich(clifford.exp(b), x))(rotor.bivectors, multivectors)
    np.testing.assert_allclose(y[:, rotor.groups], rotated[..., np.array(clifford.VECTOR)], atol=2e-6)
    pair = np.array([11, 14])
    angle = float(rotor.tail[0])
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    np.testing.assert_allclose(y[:, pair], x[:, pair] @ turn.T, atol=2e-6)


def test_closed_form_rotations():
    """KLT sorts and decorrelates; Procrustes finds the rotation that was."""
    turn = Dense.haar(jax.random.key(0), 12)
    x = turn(jax.random.normal(jax.random.key(1), (500, 12)) * jnp.arange(1, 13))
    y = np.asarray(Dense.klt(x)(x))
    covariance = y.T @ y / 500
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-3 * covariance.max())
    assert (np.diff(np.diag(covariance)) < 0).all()
    np.testing.assert_allclose(Dense.procrustes(x, turn(x)).matrix, turn.matrix, atol=1e-4)


@pytest.mark.full
def test_loud_channels_share_groups_with_quiet_ones():
    energy = jnp.asarray(np.random.default_rng(0).permutation(np.arange(1.0, 129)))
    groups = Rotor.random(jax.random.key(0), 128).groups
    dealt = np.asarray(Permutation.balanced(energy, groups)(energy))
    assert sorted(dealt.tolist()) == list(range(1, 129))
    sums = dealt[groups].sum(axis=1)
    assert sums.max() - sums.min() <= 42
    assert (dealt[groups].max(axis=1) > 128 - 42).all()
    np.testing.assert_array_equal(Permutation.descending(energy)(energy), np.arange(128, 0, -1))


@pytest.mark.full
def test_what_rotations_cost():
    """The budget of a chain: a tenth of a dense matrix's multiply-adds, a fiftieth of its numbers."""
    chain = Chain((Rotor.random(jax.random.key(0), 128), Hadamard.random(jax.random.key(1), 128)))
    assert chain.cost == 9 * 42 + 4 + 128 * 7 <= 128**2 / 10
    assert sum(leaf.size for leaf in jax.tree.leaves(chain)) == 3 * 42 + 1 + 128 <= 128**2 / 50
    assert Dense.haar(jax.random.key(0), 96).cost == 96**2
    assert Hadamard.random(jax.random.key(0), 96).cost == 96 * (5 + 3)
    assert Givens.random(jax.random.key(0), 9).cost == 16
    assert Quaternion.random(jax.random.key(0), 11).cost == 32 + 9
    assert butterfly(jax.random.key(0), 9).cost == 2 * 27
    assert orthogonality_error(chain) < 1e-5
    assert MAKERS["multivector"](jax.random.key(0), 9).cost == 27
