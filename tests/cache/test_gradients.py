"""Derivatives of attention to a cache: those of attention to decoded vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.cache.test_cache import BIAS, TEXTS, attend_anew, of_kind, tolerance
from tests.tools.plain import PlainCache

TIME = 300
OPTIONS = {"float32": {"softcap": 2.0}, "levels": {"sliding_window": 200}, "trellis": {"mask": np.arange(512) % 3 > 0}}


def plain_attention(keys, values, q, *, softcap=None, sliding_window=None, mask=None):
    """Attention of queries (time, heads, dim) to keys and values (tokens, dim)."""
    scores = jnp.einsum("thd,sd->ths", q, keys) / np.sqrt(q.shape[-1])
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    age = len(keys) - len(q) + np.arange(len(q))[:, None] - np.arange(len(keys))
    seen = (age >= 0) & (age < (sliding_window or TIME)) & (True if mask is None else mask[: len(keys)])
    return jnp.einsum("ths,sd->thd", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), values)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["levels", "affine", "trellis", "per channel", "turned", "pre_rope"])
def test_query_gradients_equal_those_of_plain_attention(kind):
    cache, groups = of_kind(kind, 512)
    q, k, v = TEXTS[0][:, :TIME].repeat(groups, axis=2), TEXTS[1][:, :TIME] + BIAS, TEXTS[2][:, :TIME]
    plain, options = PlainCache(cache), OPTIONS.get(kind, {})
    _, cache = attend_anew(q, k, v, cache)
    plain.append(k, v, mean=cache.key_form.mean)
    q = jnp.asarray(q[:, -5:])
    loss = lambda q: jnp.sin(3 * rqjax.attend(cache, q, **options)).sum()  # noqa: E731

    def expected_loss(q):
        turned = q if cache.key_form.rope is None else cache.key_form.rope(q, jnp.arange(TIME - 5, TIME)[:, None])
        parts = [plain_attention(*(x[:, 0] for x in plain.decoded(b)), turned[b], **options) for b in range(2)]
        return sum(jnp.sin(3 * part).sum() for part in parts)

    found, expected = jax.jit(jax.grad(loss))(q), jax.grad(expected_loss)(q)
    assert float(jnp.abs(expected).max()) > 0.01
    np.testing.assert_allclose(found, expected, atol=2 * tolerance(kind))


@pytest.mark.full
def test_forward_mode_agrees():
    cache, groups = of_kind("levels", 512)
    q, k, v = TEXTS[0][:, :TIME].repeat(groups, axis=2), TEXTS[1][:, :TIME], TEXTS[2][:, :TIME]
    cache, q = rqjax.append(cache, k, v), jnp.asarray(q[:, -5:])
    loss, direction = lambda q: jnp.sin(3 * rqjax.attend(cache, q)).sum(), jnp.cos(q)
    np.testing.assert_allclose(
        jax.jvp(loss, (q,), (direction,))[1], (jax.grad(loss)(q) * direction).sum(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.full
def test_gradients_of_new_tokens_and_options():
    """Tokens in full precision have derivatives; tokens in codes have none."""
    cache, _ = of_kind("levels", 512)
    q, k, v = (jnp.asarray(x[:, :TIME]) for x in TEXTS)

    def loss(k, softcap, scale):
        return jnp.sin(rqjax.attend(rqjax.append(cache, k, v), q[:, -1:], softcap=softcap, scale=scale)).sum()

    of_keys, of_softcap, of_scale = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(k, 2.0, 0.2)
    coded = int(rqjax.append(cache, k, v).coded[0])
    np.testing.assert_array_equal(of_keys[:, cache.sinks : cache.sinks + coded], 0)
    assert (jnp.abs(of_keys[:, cache.sinks + coded :]).max((0, 2, 3)) > 0).all()
    step = 1e-2
    for found, low, high in (
        (of_softcap, loss(k, 2 - step, 0.2), loss(k, 2 + step, 0.2)),
        (of_scale, loss(k, 2.0, 0.2 - step), loss(k, 2.0, 0.2 + step)),
    ):
        np.testing.assert_allclose(found, (high - low) / (2 * step), rtol=0.05)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_new_tokens_in_a_cache_of_16_bits(dtype):
    """Tokens are moved into and out of the ring as bits, whose derivative is none; that of the numbers is one."""
    cache = rqjax.strategy("eden_3", jax.random.key(0), 32).cache(2, 1, 64, window=16, sinks=2, dtype=dtype)
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 8, 1, 32)) for i in range(3))

    def loss(k, v, cache):
        return jnp.sin(3 * rqjax.attend(rqjax.append(cache, k, v), q[:, -1:])).sum()

    found = jax.grad(loss, argnums=(0, 1))(k, v, cache)
    expected = jax.grad(loss, argnums=(0, 1))(k, v, rqjax.strategy("float32", jax.random.key(0), 32).cache(2, 1, 64))
    for a, b in zip(found, expected, strict=True):
        assert float(jnp.abs(b).max()) > 0.1
        np.testing.assert_allclose(a, b, atol=0.02 * float(jnp.abs(b).max()))
