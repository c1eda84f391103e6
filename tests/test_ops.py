"""What the compiler promises about memory, and the norm's and packing's fast paths."""

import jax
import jax.numpy as jnp
import pytest

import rqjax

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


@pytest.mark.parametrize("method", ["turboquant", "hadamard", "rotor_chain"])
@pytest.mark.parametrize("dim", [128, 1024])
def test_rotated_copies_are_made_in_blocks(method, dim):
    assert temporaries(method, jnp.float32, dim=dim) < 32 + SQUARES
