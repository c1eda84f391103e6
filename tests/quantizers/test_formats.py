"""Formats decode to what other implementations of them decode to."""

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

import rqjax

pytestmark = pytest.mark.full


def vectors():
    """Vectors of many sizes, with ties, constant and zero ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 128)) * np.exp(2 * rng.normal(size=(200, 1)))
    x[0], x[1], x[2, :32], x[3, 16:48] = 0, -3, np.arange(-16, 16) / 4, np.arange(32) / 8 + 2
    return x.astype(np.float32)


def decoded(name):
    quantizer = rqjax.Formats(128, name)
    return np.asarray(jax.jit(lambda x: quantizer.decode(quantizer.encode(x)))(vectors()))


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_blocks_of_llama_cpp(name):
    kind = gguf.GGMLQuantizationType[name.upper()]
    theirs = gguf.quants.dequantize(gguf.quants.quantize(vectors(), kind), kind)
    np.testing.assert_array_equal(decoded(name), theirs)
    assert rqjax.Formats(128, name).bits_per_vector == 8 * gguf.quants.quant_shape_to_byte_shape((128,), kind)[0]


def test_nvfp4_is_that_of_mlx():
    theirs = mx.dequantize(*mx.quantize(mx.array(vectors()), mode="nvfp4"), mode="nvfp4")
    np.testing.assert_array_equal(decoded("nvfp4"), np.array(theirs.astype(mx.float32)))


def test_mxfp4_is_the_specification():
    """The power of two of the largest magnitude less two (MLX's is nearest to a sixth of it), then rounding to E2M1."""
    blocks = vectors().reshape(200, 4, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2)
    elements = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(decoded("mxfp4"), (elements * scale).reshape(200, 128))


@pytest.mark.parametrize(("name", "bits"), [("q4_0", 4.5), ("q8_0", 8.5), ("mxfp4", 4.25), ("nvfp4", 4.5)])
def test_a_cache_has_the_products_of_decoded_vectors(name, bits):
    quantizer = rqjax.Formats(64, name)
    assert quantizer.bits_per_vector == 64 * bits
    rng = np.random.default_rng(1)
    k, v, q = (jnp.asarray(rng.normal(size=(1, 80, 2, 64)), jnp.float32) for _ in range(3))
    cache = rqjax.strategy(name, jax.random.key(0), 64).cache(1, 2, 80, window=0, sinks=0, dtype=jnp.float32)
    out = rqjax.attend(rqjax.append(cache, k, v), q[:, -1:])
    k, v = (quantizer.decode(quantizer.encode(x)) for x in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bthd->bhqt", q[:, -1:], k) / 8)
    np.testing.assert_allclose(out, jnp.einsum("bhqt,bthd->bqhd", weights, v), atol=1e-4)


def test_floats_of_eight_bits_have_an_end():
    q = rqjax.Exact(4, "float8_e4m3fn")
    assert q.decode(q.encode(jnp.array([500.0, -1e9, 1.0625, 0]))).tolist() == [448, -448, 1, 0]


def test_wrong_formats():
    with pytest.raises(rqjax.UnknownName, match="nvfp4"):
        rqjax.Formats(64, "nvfp8")
    with pytest.raises(ValueError, match="multiple of q4_0's blocks of 32"):
        rqjax.Formats(48, "q4_0")
