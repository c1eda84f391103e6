"""Affine groups are bit for bit those of MLX."""

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import pytest

from rqjax import Affine

pytestmark = pytest.mark.full

GRIDS = [(bits, group_size) for bits in (2, 3, 4, 5, 6, 8) for group_size in (32, 64, 128)]
DTYPES = ("float32", "bfloat16", "float16")
CASES = [(*grid, DTYPES[(i + i // 3) % 3]) for i, grid in enumerate(GRIDS)][::2]
"""All bits, group sizes and dtypes."""


@pytest.mark.parametrize(("bits", "group_size", "dtype"), CASES)
def test_codes_are_those_of_mlx(bits, group_size, dtype):
    x = np.array(jax.random.normal(jax.random.key(bits), (20, 256)))
    x[0], x[1, :128], x[2] = 0, -1, np.abs(x[2])
    x = jnp.asarray(x, dtype)
    quantizer = Affine(256, bits, group_size=group_size, dtype=dtype)
    codes = quantizer.encode(x)
    theirs = mx.quantize(mx.array(np.asarray(x, np.float32)).astype(getattr(mx, dtype)), group_size, bits)
    for mine, other in zip(codes, theirs, strict=True):
        other = np.array(other) if other.dtype == mx.uint32 else np.array(other.astype(mx.float32))
        np.testing.assert_array_equal(np.asarray(mine).astype(np.float64), other)
    decoded = np.array(mx.dequantize(*theirs, group_size, bits).astype(mx.float32))
    # MLX rounds the product and the sum to the dtype of the scales; below 4, bfloat16 has steps of 2^-6
    atol = {"float32": 1e-6, "float16": 2**-8, "bfloat16": 2**-5}[dtype]
    np.testing.assert_allclose(quantizer.decode(codes), decoded, rtol=0, atol=atol)


def test_products_are_those_of_mlx():
    y, x = jax.random.normal(jax.random.key(0), (5, 128)), jax.random.normal(jax.random.key(1), (30, 128))
    codes = Affine(128, 4, group_size=64, dtype="float32").encode(x)
    theirs = mx.quantized_matmul(mx.array(np.asarray(y)), *map(lambda a: mx.array(np.asarray(a)), codes), True, 64, 4)
    np.testing.assert_allclose(
        Affine(128, 4, group_size=64, dtype="float32").dot(y, codes), np.array(theirs), rtol=1e-4, atol=1e-4
    )


def test_group_size_divides_the_dimension():
    with pytest.raises(ValueError, match="expected a group size that divides dim = 100, got 64"):
        Affine(100, 4, group_size=64)


def test_norms_are_baked_into_scales():
    """Scaling a vector scales its grid and leaves the indices alone."""
    quantizer = Affine(64, 4, group_size=32, dtype="float32")
    x = jax.random.normal(jax.random.key(0), (10, 64))
    words, scales, biases = quantizer.encode(x)
    louder = quantizer.encode(8 * x)
    np.testing.assert_array_equal(louder[0], words)
    np.testing.assert_array_equal(louder[1], 8 * scales)
    np.testing.assert_array_equal(louder[2], 8 * biases)
