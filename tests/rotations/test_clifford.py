"""The oracle itself: Cl(3,0) by its axioms."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.tools import clifford

BASIS = jnp.eye(8)


def test_generators_square_to_one_and_anticommute():
    e = BASIS[np.array(clifford.VECTOR)]
    for i in range(3):
        for j in range(3):
            anticommutator = clifford.product(e[i], e[j]) + clifford.product(e[j], e[i])
            np.testing.assert_array_equal(anticommutator, 2 * (i == j) * BASIS[0])
    np.testing.assert_array_equal(clifford.product(e[0], e[1]), BASIS[3])
    np.testing.assert_array_equal(clifford.product(clifford.product(e[0], e[1]), e[2]), BASIS[7])


def test_product_is_associative_over_all_512_basis_triples():
    a, b, c = (BASIS[i].reshape(-1, 8) for i in np.meshgrid(*[np.arange(8)] * 3))
    left = clifford.product(clifford.product(a, b), c)
    right = clifford.product(a, clifford.product(b, c))
    assert left.shape == (512, 8)
    np.testing.assert_array_equal(left, right)


def test_reverse_is_an_antiautomorphism():
    a, b = jax.random.normal(jax.random.key(0), (2, 20, 8))
    left = clifford.reverse(clifford.product(a, b))
    np.testing.assert_allclose(left, clifford.product(clifford.reverse(b), clifford.reverse(a)), atol=1e-5)


def test_exp_is_a_rotor_and_log_its_inverse():
    bivector = jax.random.normal(jax.random.key(0), (100, 3))
    rotor = clifford.exp(bivector)
    norm = clifford.product(rotor, clifford.reverse(rotor))
    np.testing.assert_allclose(norm, jnp.broadcast_to(BASIS[0], norm.shape), atol=1e-6)
    np.testing.assert_allclose(clifford.log(rotor), bivector, atol=1e-5)
    np.testing.assert_array_equal(clifford.log(clifford.exp(jnp.zeros(3))), 0)


def test_exp_is_the_power_series():
    bivector = jax.random.normal(jax.random.key(0), (3,))
    half = clifford.embed(bivector, clifford.BIVECTOR) / 2
    term = total = BASIS[0]
    for n in range(1, 30):
        term = clifford.product(term, half) / n
        total = total + term
    np.testing.assert_allclose(clifford.exp(bivector), total, atol=1e-6)


def test_sandwich_keeps_every_grade():
    rotor = clifford.exp(jax.random.normal(jax.random.key(0), (3,)))
    for k in range(4):
        part = clifford.grade(jax.random.normal(jax.random.key(k), (8,)), k)
        rotated = clifford.sandwich(rotor, part)
        np.testing.assert_allclose(rotated, clifford.grade(rotated, k), atol=1e-6)
