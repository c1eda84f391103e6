"""Learned sinks: one more score of each query head, whose value is zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.nn import exact_attention
from tests.cache.test_cache import append, attend, empty, random
from tests.tools.plain import PlainCache, error
from tests.tools.suites import some

SINKS = np.array([0.7, -np.inf, 3.0, -2.0], np.float32)


@pytest.mark.parametrize("options", some([{}, {"softcap": 2.0, "sliding_window": 20, "scale": 0.3}], []))
def test_attention_with_sinks(options):
    """A prefill of more queries than one block, then one token, to a cache with codes."""
    k, v, q = random(1, 2, 180, 2, 32), random(2, 2, 180, 2, 32), random(3, 2, 150, 4, 32)
    cache, plain = append(empty(heads=2), k, v), PlainCache(empty(heads=2))
    plain.append(k, v)
    assert cache.coded.tolist() == [160, 160]
    for part in (q, q[:, -1:]):
        found = attend(cache, part, sink_logits=SINKS, **options)
        assert error(found, plain.attend(part, sink_logits=SINKS, **options)) < 1e-4
    none = attend(cache, q, sink_logits=jnp.full(4, -jnp.inf), **options)
    np.testing.assert_allclose(none, attend(cache, q, **options), atol=2e-7)  # another program may fuse otherwise


@pytest.mark.parametrize("slots", some([None, [1]], []))
def test_sinks_of_caches_with_pages(slots):
    k, v, q = random(1, 2, 180, 2, 32), random(2, 2, 180, 2, 32), random(3, 2, 3, 4, 32)
    own, paged = append(empty(heads=2), k, v), rqjax.PagedCache(empty(heads=2, pages=4), chunk=256)
    for slot in range(2):
        paged.admit([slot] * 180)
        paged.reserve(slot, [slot] * 180)
        paged.update(append(paged.caches, k[slot][None], v[slot][None], slots=jnp.array([slot])))
    rows = range(2) if slots is None else slots
    found = rqjax.attend(paged.caches, q[rows], sink_logits=SINKS, slots=None if slots is None else jnp.array(slots))
    assert error(found, attend(own, q, sink_logits=SINKS)[jnp.array(rows)]) < 1e-5


@pytest.mark.full
def test_gradients_of_sinks():
    """Gradients go through exact attention and through a cache without codes, whose blocks are a loop without a
    transpose."""
    k, v, q = random(1, 1, 12, 2, 32), random(2, 1, 12, 2, 32), random(3, 1, 12, 4, 32)
    cache = append(empty("float32", window=192, sinks=0, batch=1, heads=2), k, v)

    def gradients(attention):
        loss = lambda q, sinks: (attention(q, sink_logits=sinks) * q).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(jnp.array(q), jnp.array(SINKS))

    found = gradients(lambda q, **sinks: rqjax.attend(cache, q, **sinks))
    expected = gradients(lambda q, **sinks: exact_attention(q, jnp.array(k), jnp.array(v), scale=32**-0.5, **sinks))
    for one, other in zip(found, expected, strict=True):
        assert float(jnp.abs(other).max()) > 0.1
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.full
def test_sinks_alone_are_seen():
    """Nothing is summed for a query that sees no token."""
    cache = append(empty(heads=2), random(1, 2, 40, 2, 32), random(2, 2, 40, 2, 32))
    out = attend(cache, random(3, 2, 1, 4, 32), mask=jnp.zeros(192, bool), sink_logits=SINKS)
    np.testing.assert_array_equal(out, np.zeros_like(out))
