"""Tokens of one call see each other in full precision, however many they are, and what came before from the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.plain import PlainCache, error
from tests.tools.suites import some

ROPE = rqjax.rotations.Rope(1e4)
CALLS = (50, 180, 3, 50)
OPTIONS = {
    "none": {},
    "window": {"sliding_window": 60},
    "softcap": {"softcap": 5.0, "scale": 0.5},
    "sinks": {"sink_logits": np.array([0.5, -1, 2, 0], np.float32)},
}


def made(name, batch=2, **options):
    strategy = rqjax.strategy(name, jax.random.key(0), 32)
    return strategy.cache(batch, 2, 384, rope=ROPE, window=16, sinks=4, dtype=jnp.float32, **options)


def tokens(count, batch=2):
    rng = np.random.default_rng(count)
    return (rng.standard_normal((batch, count, heads, 32)).astype(np.float32) for heads in (4, 2, 2))


call = jax.jit(rqjax.dot_product_attention, static_argnames="sliding_window")


CASES = [("eden_2+pre_rope", options) for options in OPTIONS]
CASES += [("eden_2", "none"), ("eden_2", "sinks"), ("kivi_2", "none"), ("kivi_2", "window")]


@pytest.mark.parametrize(("name", "options"), some(CASES, CASES[:1]))
def test_calls_of_any_length(name, options):
    """Calls longer than the window and shorter, against NumPy; two bits, whose error would show."""
    cache = made(name)
    plain = PlainCache(cache)
    for count in CALLS:
        q, k, v = tokens(count)
        out, cache = call(q, k, v, cache, **OPTIONS[options])
        plain.append(k, v, mean=cache.key_form.mean)
        assert error(out, plain.attend(q, own=count > 16, **OPTIONS[options])) < 1e-4


@pytest.mark.full
def test_padding_and_a_mask():
    """Queries that are padding do not count; a mask is by token."""
    cache = made("eden_2")
    plain = PlainCache(cache)
    mask = np.random.default_rng(0).random((1, 1, 1, 384)) < 0.7
    for count in (60, 90):
        q, k, v = tokens(count)
        valid = np.array([count, count - 37])
        out, cache = call(q, k, v, cache, valid=valid, mask=jnp.asarray(mask))
        plain.append(k, v, valid=valid)
        expected = plain.attend(q, own=True, mask=mask)
        assert error(out[0], expected[0]) < 1e-4
        assert error(out[1, 37:], expected[1, 37:]) < 1e-4


@pytest.mark.full
def test_pages_and_slots():
    """A cache in pages gives what sequences with room of their own give."""
    paged, own = rqjax.PagedCache(made("eden_2", 3, pages=12)), made("eden_2")
    slots = np.array([paged.admit(range(start, start + 250))[0] for start in (0, 1000)])
    for count in (100, 150):
        q, k, v = tokens(count)
        for slot in slots:
            paged.reserve(int(slot), count)
        out, caches = rqjax.dot_product_attention(q, k, v, paged.caches, slots=slots)
        paged.update(caches)
        expected, own = rqjax.dot_product_attention(q, k, v, own)
        np.testing.assert_allclose(out, expected, atol=1e-5)


def test_a_prompt_in_one_call_loses_nothing():
    """Its tokens see no code at all, so that attention is exact; gradients flow to every token."""
    q, k, v = tokens(200)
    exact = made("float32")
    expected, _ = rqjax.dot_product_attention(q, k, v, exact)
    found, grad = jax.jit(
        jax.value_and_grad(lambda k: (rqjax.dot_product_attention(q, k, v, made("eden_2"))[0] ** 2).sum())
    )(k)
    np.testing.assert_allclose(found, (expected**2).sum(), rtol=1e-5)
    assert (np.abs(grad).sum((0, 2, 3)) > 0).all()


@pytest.mark.parametrize("sliding_window", some([None, 20], [20]))
def test_a_sequence_without_tokens_has_no_queries(sliding_window):
    """Its rows are zeros, whatever it holds; the other's are as before."""
    strategy = rqjax.strategy("eden_2", jax.random.key(0), 32)
    cache = strategy.cache(2, 2, 2048, window=16, dtype=jnp.float32, sliding_window=sliding_window)
    assert cache.sliding_window == sliding_window
    _, cache = call(*tokens(100), cache, sliding_window=sliding_window)
    for count in (1, 40):
        new = list(tokens(count))
        expected, _ = call(*new, cache, sliding_window=sliding_window)
        out, after = call(*new, cache, valid=np.array([0, count]), sliding_window=sliding_window)
        assert error(out[1], expected[1]) < 1e-6
        assert (after.lengths.tolist(), np.abs(out[0]).max()) == ([100, 100 + count], 0)
