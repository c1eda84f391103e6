"""FAISS's TurboQuant codecs and product quantizers are independent implementations of the same algorithms."""

import faiss
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.opq import fit_opq


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


def test_product_quantizers_agree_with_faiss():
    """PQ and OPQ on correlated vectors, 64 centroids for 8 coordinates: mean squared errors within 3 %."""
    noise = np.asarray(jax.random.normal(jax.random.key(0), (4096, 40)))
    x = np.ascontiguousarray(sum(0.7**i * noise[:, i : i + 32] for i in range(8)))
    theirs = faiss.ProductQuantizer(32, 4, 6)
    theirs.train(x)
    expected = ((x - theirs.decode(theirs.compute_codes(x))) ** 2).mean()
    rotation = faiss.OPQMatrix(32, 4)
    rotation.pq = theirs
    rotation.train(x)
    y = rotation.apply(x)
    theirs.train(y)
    expected_rotated = ((y - theirs.decode(theirs.compute_codes(y))) ** 2).mean()

    def error(quantizer):
        return float(jnp.mean((x - quantizer.decode(quantizer.encode(x))) ** 2))

    assert error(rqjax.Product.fit(jax.random.key(1), jnp.asarray(x), 8, 64)) == pytest.approx(expected, rel=0.03)
    fitted = jax.jit(fit_opq, static_argnums=(2, 3))(jax.random.key(1), jnp.asarray(x), 8, 64)
    assert error(fitted) == pytest.approx(expected_rotated, rel=0.03)
    assert error(fitted) < expected
