"""A combinator and a leaf of somebody else's, in caches, an index, files and training."""

import jax
import jax.numpy as jnp
import pytest

import rqjax
from tests.tools.suites import some

KEY, DIM = jax.random.key(0), 32
X = jax.random.normal(KEY, (2, 300, 2, DIM))
Y = X[0, 0]


@rqjax.pytree
class Stretched(rqjax.Wrapper):
    """A combinator that multiplies coordinates by factors before its inner quantizer encodes them."""

    factors: jax.Array
    inner: rqjax.Quantizer

    def encode(self, x):
        return self.inner.encode(x * self.factors)

    def decode(self, codes):
        return self.inner.decode(codes) / self.factors

    def prepare(self, y):
        return self.inner.prepare(y / self.factors)

    def restore(self, sums):
        return self.inner.restore(sums) / self.factors


@rqjax.pytree
class Multiples(rqjax.Quantizer):
    """A leaf that rounds to multiples of a step, with no product of its own."""

    step: jax.Array
    dim: int = rqjax.static()

    def encode(self, x):
        return jnp.round(x / self.step).astype(jnp.int8)

    def decode(self, codes):
        return self.step * codes


def test_a_part_that_cannot_work_says_why():
    with pytest.raises(ValueError, match=r"expected a name that no class of rqjax has, .* got Scaled"):
        rqjax.pytree(type("Scaled", (rqjax.Wrapper,), {}))
    part = rqjax.pytree(type("Half", (rqjax.Quantizer,), {"dim": DIM}))()
    with pytest.raises(NotImplementedError, match="expected an encode in Half, got none"):
        part.encode(X)


@pytest.mark.parametrize("leaf", some([True, False], [True]))
def test_a_quantizer_from_outside_works_wherever_others_do(leaf, tmp_path):
    inner = Multiples(jnp.float32(0.1), dim=DIM) if leaf else rqjax.eden(KEY, DIM, 8)
    codes = (quantizer := Stretched(jnp.linspace(0.5, 2, DIM), inner)).encode(X)
    assert jnp.allclose(quantizer.dot(Y, codes), jnp.tensordot(Y, quantizer.decode(codes), (-1, -1)), atol=1e-3)
    caches = [rqjax.KVCache.init(2, 2, 400, q, q, window=16) for q in (quantizer, rqjax.Exact(DIM))]
    assert rqjax.metrics.cosine(*(rqjax.dot_product_attention(X, X, X, cache)[0] for cache in caches)) > 0.99
    _, ids = rqjax.Index.build(quantizer, X.reshape(-1, DIM)).search(X[0, :9, 0], 1)
    assert ids.ravel().tolist() == [*range(0, 18, 2)]
    rqjax.save(quantizer, tmp_path / "q")
    assert jnp.array_equal(rqjax.load(tmp_path / "q", quantizer).decode(codes), quantizer.decode(codes))
    assert jnp.any(jax.grad(lambda q: jnp.sum(rqjax.straight_through(q, X) ** 2))(quantizer).factors != 0)
