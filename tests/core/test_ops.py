"""Memory that the compiler promises, and the fast paths of norms and packing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.arrays import planes
from tests.tools.suites import some

MIB = 2**20
SQUARES = 0 if jax.__version_info__ >= (0, 10) else 33
"""Older compilers store the squares that the norm sums."""


def temporaries(method, dtype, bits=3, dim=128):
    """MiB of temporaries in encoding 65,536 x 128 numbers (32 MiB in float32), by the compiler's own analysis."""
    quantizer = rqjax.METHODS[method](jax.random.key(0), dim, bits)
    vectors = jax.ShapeDtypeStruct((2**23 // dim, dim), dtype)
    compiled = jax.jit(lambda q, x: q.encode(x)).lower(quantizer, vectors).compile()
    return compiled.memory_analysis().temp_size_in_bytes / MIB


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rotors_make_no_copy_of_the_vectors(bits):
    """Only lane words (4 MiB) where the packing needs them, and norms."""
    assert temporaries("rotorquant", jnp.float32, bits) < 5 + SQUARES


def test_bfloat16_is_not_widened_as_a_whole():
    """16 MiB are the input's own bits as integers."""
    assert temporaries("rotorquant", jnp.bfloat16) < 21 + SQUARES


COPIED = list(itertools.product(("turboquant", "hadamard", "rotor_chain"), (128, 1024)))


@pytest.mark.parametrize(("method", "dim"), some(COPIED, [("turboquant", 128), ("hadamard", 1024)]))
def test_rotated_copies_are_made_in_blocks(method, dim):
    assert temporaries(method, jnp.float32, dim=dim) < 32 + SQUARES


@pytest.mark.parametrize("x", [np.float32("nan"), np.float32("-inf"), np.uint32(2**32 - 1), np.uint8(255)])
def test_stored_changes_nothing_and_stays(x):
    """The loop of `materialized` makes no trip, whatever the numbers, but the compiler does not know."""
    compiled = jax.jit(planes.materialized).lower(x := np.full((2, 3), x)).compile()
    assert " while(" in str(compiled.as_text())
    np.testing.assert_array_equal(compiled(x), x)


@pytest.mark.parametrize("method", some(["eden", "turboquant_trellis"], ["eden"]))
def test_a_vector_of_nan_leaves_the_products_of_others(method):
    """40,000 codes, those of 2,000 vectors again and again, are read in blocks, the last of which reaches back; all
    products equal those of decoded vectors."""
    quantizer = rqjax.METHODS[method](jax.random.key(1), 64, 3)
    x, y = jax.random.normal(jax.random.key(0), (2000, 64)), jnp.ones((2, 64))

    @jax.jit
    def run(quantizer, y, x):
        codes = jax.tree.map(lambda a: jnp.tile(a, (20, *[1] * (a.ndim - 1))), quantizer.encode(x))
        return quantizer.dot(y, codes), quantizer.decode(codes)

    (found, decoded), others = run(quantizer, y, x), np.arange(40_000) % 2000 > 0
    again, _ = run(quantizer, y, x.at[0, 0].set(jnp.nan))
    np.testing.assert_array_equal(again[:, others], found[:, others])
    np.testing.assert_allclose(found, jnp.matmul(y, decoded.T, precision="highest"), atol=1e-4)


def test_products_unpack_a_block_of_codes_at_a_time():
    """MiB of temporaries: all of 200,000 x 64 numbers in float32 are 49."""
    quantizer = rqjax.turboquant_trellis(jax.random.key(0), 64, 3)
    codes = jax.eval_shape(quantizer.encode, jnp.zeros((200_000, 64)))
    compiled = jax.jit(lambda q, y, c: q.dot(y, c)).lower(quantizer, jnp.ones((1, 64)), codes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes / MIB < 20


def test_rounding_the_norm_costs_nothing():
    """Directions are relative to the norm as stored: relative to the norm itself the error would be 1e-6."""
    x = jax.random.normal(jax.random.key(0), (50, 8))
    quantizer = rqjax.Normalized(rqjax.Uniform(jnp.float32(-1.5), jnp.float32(3 / 2**16), dim=8, bits=16))
    trip = jax.jit(lambda q, x: rqjax.metrics.relative_mse(x, q.decode(q.encode(x))))
    assert trip(quantizer, x) < 1e-8
