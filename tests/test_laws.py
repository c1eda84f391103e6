"""The laws of the protocol, for every method: a new recipe inherits them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import METHODS

MORE = [("turboquant_mixed", 2.5, 128), ("turboquant_prod", 1, 128), ("rotorquant", 3, 5), ("rotorquant", 2, 64)]
MORE += [
    ("hadamard", 4, 96),
    *((name, 8, 50) for name in ("rotorquant", "turboquant_prod", "isoquant", "affine", "eden")),
]
CASES = [(name, 3, 80) for name in METHODS] + MORE


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request):
    name, bits, dim = request.param
    keys = jax.random.split(jax.random.key(0), 3)
    quantizer = METHODS[name](keys[0], dim, bits)
    return quantizer, jax.random.normal(keys[1], (2, 6, dim)), jax.random.normal(keys[2], (2, dim))


def close(a, b):
    scale = np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-6 * scale)


def assert_same_codes(quantizer, a, b):
    """Equal up to values that lie within rounding of a boundary: fused multiply-adds round differently.

    One index of the 12 vectors may flip; a norm may round the other way to bfloat16 (2^-8).
    """
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [leaf.dtype for leaf in jax.tree.leaves(a)] == [leaf.dtype for leaf in jax.tree.leaves(b)]
    x, y = quantizer.decode(a), quantizer.decode(b)
    error = jnp.linalg.norm(x - y, axis=-1) / jnp.linalg.norm(y, axis=-1)
    assert (error > 2**-7).sum() <= 1
    assert (error > 1e-6).sum() <= 2


def test_dot_is_the_product_with_decoded_vectors(case):
    quantizer, x, y = case
    codes = quantizer.encode(x)
    decoded = quantizer.decode(codes)
    assert decoded.shape == x.shape
    assert decoded.dtype == jnp.float32
    products = quantizer.dot(y, codes)
    assert products.shape == (2, 2, 6)
    close(products, jnp.einsum("md,abd->mab", y, decoded, precision="highest"))
    close(quantizer.dot(y[0], codes), products[0])


def test_bytes_of_codes_are_bits_per_vector(case):
    quantizer, x, _ = case
    codes = quantizer.encode(x)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(codes)) == rqjax.nbytes(codes)
    assert 8 * rqjax.nbytes(codes) == 12 * quantizer.bits_per_vector
    assert all(leaf.shape[:2] == (2, 6) for leaf in jax.tree.leaves(codes))


def test_encode_is_the_same_under_jit_vmap_and_in_a_loop(case):
    quantizer, x, _ = case
    codes = quantizer.encode(x)
    assert_same_codes(quantizer, jax.jit(lambda q, x: q.encode(x))(quantizer, x), codes)
    assert_same_codes(quantizer, jax.vmap(quantizer.encode)(x), codes)
    loop = jax.tree.map(lambda *rows: jnp.stack(rows), *[quantizer.encode(block) for block in x])
    assert_same_codes(quantizer, loop, codes)


def test_quantizer_is_a_pytree(case):
    quantizer, x, _ = case
    leaves, structure = jax.tree.flatten(quantizer)
    again = jax.tree.unflatten(structure, leaves)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(again), strict=True))
    assert again.dim == quantizer.dim
    shapes = jax.eval_shape(lambda q, x: q.encode(x), quantizer, x)
    assert 8 * rqjax.nbytes(shapes) == 12 * quantizer.bits_per_vector


@pytest.mark.parametrize("name", METHODS)
def test_new_arrays_never_recompile(name):
    calls = []

    @jax.jit
    def encode(quantizer, x):
        calls.append(1)
        return quantizer.encode(x)

    for seed in range(3):
        encode(METHODS[name](jax.random.key(seed), 32, 3), jnp.ones((2, 32)) * seed)
    assert len(calls) == 1


@pytest.mark.parametrize("name", METHODS)
def test_one_quantizer_a_head_by_vmap(name):
    """Quantizers are built, used and indexed by vmap."""
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(jax.random.key(1), (2, 5, 32))
    quantizers = jax.vmap(lambda key: METHODS[name](key, 32, 2))(keys)
    decoded = jax.vmap(lambda q, x: q.decode(q.encode(x)))(quantizers, x)
    one = METHODS[name](keys[1], 32, 2)
    np.testing.assert_allclose(decoded[1], one.decode(one.encode(x[1])), atol=0.02)


HALVES = [(name, "bfloat16") for name in METHODS]
HALVES += [(name, "float16") for name in ("rotorquant", "turboquant_prod", "affine", "eden")]


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_low_precision_input_is_widened(name, dtype):
    quantizer = METHODS[name](jax.random.key(0), 64, 3)
    x = jax.random.normal(jax.random.key(1), (8, 64)).astype(dtype)
    assert_same_codes(quantizer, quantizer.encode(x), quantizer.encode(x.astype(jnp.float32)))


def test_gradients_reach_rotation_and_step():
    quantizer = rqjax.rotorquant(jax.random.key(0), 32, 4)
    x = jax.random.normal(jax.random.key(1), (16, 32))
    codes = quantizer.encode(x)

    def loss(bivectors, step):
        rotation = dataclasses.replace(quantizer.inner.rotation, bivectors=bivectors)
        inner = dataclasses.replace(quantizer.inner, rotation=rotation)
        inner = dataclasses.replace(inner, inner=dataclasses.replace(inner.inner, step=step))
        return jnp.sum((dataclasses.replace(quantizer, inner=inner).decode(codes) - x) ** 2)

    for at in (quantizer.inner.rotation.bivectors, jnp.zeros((10, 3))):
        gradients = jax.grad(loss, argnums=(0, 1))(at, quantizer.inner.inner.step)
        assert all(jnp.isfinite(g).all() and jnp.abs(g).max() > 0 for g in gradients)


def test_fractional_bits_split_the_channels():
    true = {2.25: 32 + 2 * 128, 2.5: 64 + 2 * 128, 2.75: 96 + 2 * 128, 3.5: 64 + 3 * 128}
    for bits, stored in true.items():
        assert rqjax.turboquant_mixed(jax.random.key(0), 128, bits).bits_per_vector == stored + 16


def test_three_bits_are_48_bytes_and_a_norm():
    quantizer = rqjax.rotorquant(jax.random.key(0), 128, 3)
    norm, words = quantizer.encode(jnp.ones((1, 128)))
    assert (norm.nbytes, words.nbytes) == (2, 48)
