"""FAISS's TurboQuant codecs are an independent implementation of the same algorithm."""

import faiss
import jax
import numpy as np
import pytest

import rqjax


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_mean_squared_error_agrees_with_faiss(bits):
    """Within 1 % on the same rotated unit vectors."""
    x = np.array(jax.random.normal(jax.random.key(0), (20_000, 128)))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    codec = faiss.ScalarQuantizer(128, getattr(faiss.ScalarQuantizer, f"QT_{bits}bit_tqmse"))
    codec.train(x)
    theirs = np.mean(np.sum((codec.decode(codec.compute_codes(x)) - x) ** 2, axis=1))
    quantizer = rqjax.turboquant(jax.random.key(1), 128, bits)
    decoded = quantizer.decode(quantizer.encode(x))
    mine = float(rqjax.metrics.relative_mse(x, decoded))
    assert abs(mine / theirs - 1) < 0.01
