"""A rotation of somebody else's, in a recipe, a cache, a file and training: nothing that rqjax knows of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rqjax

KEY, DIM = jax.random.key(0), 32
X = jax.random.normal(KEY, (1, 300, 2, DIM)) * jnp.linspace(0.2, 2, DIM)


@rqjax.pytree
class Reflection:
    """The Householder reflection I - 2 v v^T / v^T v."""

    normal: jax.Array

    @property
    def dim(self):
        return self.normal.shape[-1]

    @property
    def cost(self):
        return 2 * self.dim

    blocked = False

    def __call__(self, x):
        x = jnp.asarray(x, jnp.promote_types(x.dtype, jnp.float32))
        along = jnp.sum(x * self.normal, axis=-1, keepdims=True) / jnp.sum(self.normal**2)
        return x - 2 * along * self.normal

    inverse = __call__


@pytest.mark.full
def test_a_rotation_from_outside_works_wherever_others_do(tmp_path):
    rotation = Reflection(jax.random.normal(jax.random.key(1), (DIM,)))
    assert isinstance(rotation, rqjax.rotations.Rotation)
    assert rqjax.rotations.orthogonality_error(rotation) < 1e-5
    quantizer = rqjax.Scaled(rqjax.Rotated(rotation, rqjax.lloyd_max(DIM, 4)))
    codes = quantizer.encode(X)
    products = jnp.einsum("md,...d->m...", X[0, :3, 0], quantizer.decode(codes), precision="highest")
    np.testing.assert_allclose(quantizer.dot(X[0, :3, 0], codes), products, atol=1e-4)
    caches = [rqjax.KVCache.init(1, 2, 400, q, q, window=16) for q in (quantizer, rqjax.Exact(DIM, "float32"))]
    found, exact = (rqjax.dot_product_attention(X, X, X, cache)[0] for cache in caches)
    assert rqjax.metrics.cosine(found, exact) > 0.97
    rqjax.save(quantizer, tmp_path / "quantizer")
    np.testing.assert_array_equal(rqjax.load(tmp_path / "quantizer", quantizer).decode(codes), quantizer.decode(codes))
    trained, _ = rqjax.fit(
        quantizer, X.reshape(-1, DIM), KEY, where=lambda q: q.inner.rotation, optimizer=optax.adam(0.02), steps=50
    )
    errors = [rqjax.metrics.relative_mse(X, q.decode(q.encode(X))) for q in (quantizer, trained)]
    assert errors[1] < errors[0]
