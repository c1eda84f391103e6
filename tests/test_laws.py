"""The laws of the protocol, for every method: a new recipe inherits them."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import METHODS
from rqjax.product import Rounded

SHAPES = {
    "turboquant_prod": [(1, 128), (8, 50)],  # at one bit the sketch alone
    "turboquant_mixed": [(2.5, 128)],
    "hadamard": [(4, 96)],
    "rotorquant": [(3, 5), (2, 64)],
    "isoquant": [(8, 50)],
    "eden": [(8, 50)],
    "turboquant_trellis": [(2.5, 60)],
    "turboquant_trellis_unbiased": [(1, 24)],
    "affine": [(8, 50)],
}
"""Bits and dimensions that ask more of a method than the usual ones."""


def columns(key, dim, bits):
    given = (bits + 2,) * 10 + (bits,) * 20 + (0,) * (dim - 30)
    return rqjax.Columns.gaussian(0.1 * jax.random.normal(key, (dim,)), jnp.ones(dim), given)


def trellis_columns(key, dim, bits):
    given = (bits + 2,) * 10 + (bits,) * 20 + (1,) * 7 + (0,) * (dim - 37)
    first, second = jax.random.split(key)
    deviation = jax.random.uniform(first, (dim,), minval=0.5, maxval=2)
    return rqjax.TrellisColumns.gaussian(0.1 * jax.random.normal(second, (dim,)), deviation, given)


def gain(key, dim, bits):
    return rqjax.Gain(jax.random.uniform(key, (dim,)), columns(key, dim, bits))


def uniform(key, dim, bits):
    return rqjax.Uniform(jnp.full((), -2.0), jnp.full((), 0.5), bits, dim)


def product(key, dim, bits):
    return rqjax.Product(jax.random.normal(key, (dim // 5, 2**bits - 1, 5)))


def product_rounded(key, dim, bits):
    return rqjax.Product(Rounded.of(product(key, dim, bits).codebooks, 10))


def exchanged(key, dim, bits):
    return rqjax.Exchange(product(key, dim, bits), 4)


def local(key, dim, bits):
    first, second = jax.random.split(key)
    return rqjax.Local(
        jax.random.normal(first, (3, dim)), jax.vmap(lambda key: product(key, dim, bits))(jax.random.split(second, 3))
    )


LEARNED = (columns, trellis_columns, gain, uniform, product, product_rounded, exchanged, local)
"""What learned quantizers are made of."""

RECIPES = {**METHODS, **{make.__name__: make for make in LEARNED}}
CASES = [(name, *shape) for name in RECIPES for shape in SHAPES.get(name, [(3, 80)])]
TRACES = []


@jax.jit
def encode(quantizer, x):
    TRACES.append(x.shape)
    return quantizer.encode(x)


@jax.jit
def decode(quantizer, codes):
    return quantizer.decode(codes)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def case(request):
    name, bits, dim = request.param
    keys = jax.random.split(jax.random.key(0), 3)
    quantizer, x = RECIPES[name](keys[0], dim, bits), jax.random.normal(keys[1], (2, 6, dim))
    return SimpleNamespace(
        name=name,
        make=lambda key: RECIPES[name](key, dim, bits),
        quantizer=quantizer,
        x=x,
        y=jax.random.normal(keys[2], (2, dim)),
        codes=encode(quantizer, x),
    )


def close(a, b):
    scale = np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-6 * scale)


def assert_same_codes(quantizer, a, b):
    """Equal up to values that lie within rounding of a boundary: fused multiply-adds round differently.

    One index of the 12 vectors may flip; a norm may round the other way to bfloat16 (2^-8).
    """
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [leaf.dtype for leaf in jax.tree.leaves(a)] == [leaf.dtype for leaf in jax.tree.leaves(b)]
    x, y = (np.asarray(decode(quantizer, codes)) for codes in (a, b))
    error = np.linalg.norm(x - y, axis=-1) / np.linalg.norm(y, axis=-1)
    assert (error > 2**-7).sum() <= 1
    assert (error > 1e-6).sum() <= 2


def test_dot_is_the_product_with_decoded_vectors(case):
    decoded = decode(case.quantizer, case.codes)
    assert decoded.shape == case.x.shape
    assert decoded.dtype == jnp.float32
    products, first = jax.jit(lambda q, y, c: (q.dot(y, c), q.dot(y[0], c)))(case.quantizer, case.y, case.codes)
    assert products.shape == (2, 2, 6)
    close(products, jnp.einsum("md,abd->mab", case.y, decoded, precision="highest"))
    close(first, products[0])


def test_bytes_of_codes_are_bits_per_vector(case):
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(case.codes)) == rqjax.nbytes(case.codes)
    assert 8 * rqjax.nbytes(case.codes) == 12 * case.quantizer.bits_per_vector
    assert all(leaf.shape[:2] == (2, 6) for leaf in jax.tree.leaves(case.codes))


def test_encode_is_the_same_under_jit_vmap_and_in_a_loop(case):
    """The loop is outside jit."""
    loop = jax.tree.map(lambda *rows: jnp.stack(rows), *[case.quantizer.encode(block) for block in case.x])
    assert_same_codes(case.quantizer, case.codes, loop)
    assert_same_codes(case.quantizer, jax.jit(jax.vmap(encode, (None, 0)))(case.quantizer, case.x), loop)


def test_quantizer_is_a_pytree(case):
    leaves, structure = jax.tree.flatten(case.quantizer)
    again = jax.tree.unflatten(structure, leaves)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(again), strict=True))
    assert again.dim == case.quantizer.dim
    shapes = jax.eval_shape(encode, case.quantizer, case.x)
    assert 8 * rqjax.nbytes(shapes) == 12 * case.quantizer.bits_per_vector


def test_new_arrays_never_recompile(case):
    before = len(TRACES)
    for seed in (3, 4):
        encode(case.make(jax.random.key(seed)), seed * case.x)
    assert len(TRACES) == before


def test_one_quantizer_a_head_by_vmap(case):
    """Quantizers are built, used and indexed by vmap."""
    keys = jax.random.split(jax.random.key(1), 2)

    @jax.jit
    def decoded(keys, x):
        quantizers = jax.vmap(case.make)(keys)
        return jax.vmap(lambda q, x: q.decode(q.encode(x)))(quantizers, x)

    one = case.make(keys[1])
    expected = decode(one, encode(one, case.x))
    np.testing.assert_allclose(decoded(keys, case.x)[1], expected[1], atol=0.02)


HALF = ("rotorquant", "turboquant_prod", "affine", "eden")


def test_low_precision_input_is_widened(case):
    """From bfloat16 for every method, from float16 for those of `HALF`."""
    for dtype in ("bfloat16", "float16") if case.name in HALF else ("bfloat16",):
        x = case.x.astype(dtype)
        assert_same_codes(case.quantizer, encode(case.quantizer, x), encode(case.quantizer, x.astype(jnp.float32)))


def test_gradients_reach_rotation_and_step():
    quantizer = rqjax.rotorquant(jax.random.key(0), 32, 4)
    x = jax.random.normal(jax.random.key(1), (16, 32))
    codes = quantizer.encode(x)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(bivectors, step):
        rotation = dataclasses.replace(quantizer.inner.rotation, bivectors=bivectors)
        inner = dataclasses.replace(quantizer.inner, rotation=rotation)
        inner = dataclasses.replace(inner, inner=dataclasses.replace(inner.inner, step=step))
        return jnp.sum((dataclasses.replace(quantizer, inner=inner).decode(codes) - x) ** 2)

    for at in (quantizer.inner.rotation.bivectors, jnp.zeros((10, 3))):
        found = gradients(at, quantizer.inner.inner.step)
        assert all(jnp.isfinite(g).all() and jnp.abs(g).max() > 0 for g in found)


def test_fractional_bits_split_the_channels():
    true = {2.25: 32 + 2 * 128, 2.5: 64 + 2 * 128, 2.75: 96 + 2 * 128, 3.5: 64 + 3 * 128}
    for bits, stored in true.items():
        assert rqjax.turboquant_mixed(jax.random.key(0), 128, bits).bits_per_vector == stored + 16


def test_three_bits_are_48_bytes_and_a_norm():
    quantizer = rqjax.rotorquant(jax.random.key(0), 128, 3)
    norm, words = quantizer.encode(jnp.ones((1, 128)))
    assert (norm.nbytes, words.nbytes) == (2, 48)
