"""Caches in states that are rare: numbers beyond a dtype, marks of overflow, no room for codes, no sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (1, 300, 2, 32))


def test_numbers_beyond_eight_bits_become_the_largest():
    cache = rqjax.strategy("float8", KEY, 32).cache(1, 2, 256)
    out = rqjax.attend(rqjax.append(cache, X[:, :3].at[0, 1, 0, 0].set(500.0), X[:, :3]), X[:, :1])
    assert np.isfinite(out).all()


def test_room_is_made_for_a_sequence_that_had_none():
    cache = rqjax.append(rqjax.strategy("eden_4", KEY, 32).cache(1, 2, 300), X[:, :200], X[:, :200])
    full = jax.jit(rqjax.append)(cache, X, X)
    assert full.overflow.all()
    grown = rqjax.append(rqjax.grow(full, 1000), X, X)
    own = rqjax.append(rqjax.append(rqjax.grow(cache, 1000), X, X), X[:, :0], X[:, :0])
    np.testing.assert_array_equal(rqjax.attend(grown, X[:, :1]), rqjax.attend(own, X[:, :1]))


def test_requantizes_without_room_for_codes():
    cache = rqjax.append(rqjax.strategy("eden_4", KEY, 32).cache(1, 2, 128), X[:, :90], X[:, :90])
    smaller = rqjax.requantize(cache, rqjax.strategy("eden_2", jax.random.key(1), 32))
    np.testing.assert_array_equal(rqjax.attend(smaller, X[:, :1]), rqjax.attend(cache, X[:, :1]))
    pages = rqjax.strategy("eden_4", KEY, 32).cache(2, 2, 128, pages=3)
    more = rqjax.requantize(pages, rqjax.strategy("eden_2", KEY, 32), pages=5)
    assert {leaf.shape[0] for leaf in jax.tree.leaves((more.keys, more.values))} == {5}


def test_latents_stay_of_one_size():
    made = {size: rqjax.strategy("eden_4", KEY, 96, latent=size) for size in (64, 32)}
    with pytest.raises(ValueError, match="expected values of 64 dimensions, got 32"):
        rqjax.requantize(made[64].cache(1, 1, 512), made[32])
    windows = [made[64].cache(1, 1, 8192, sliding_window=window) for window in (64, 8000)]
    assert [cache.values_in_keys for cache in windows] == [True, True]


def test_no_sequence():
    cache, nothing = rqjax.strategy("eden_4", KEY, 32).cache(2, 2, 512, pages=4), jnp.ones((0, 3, 2, 32))
    assert rqjax.append(cache, nothing, nothing, slots=np.array([], int)).lengths.tolist() == [0, 0]


def test_queries_see_what_was_forgotten_before_a_cut():
    exact = rqjax.Exact(32, "float32")
    empty = rqjax.KVCache.init(1, 2, 640, exact, exact, sliding_window=60, dtype=jnp.float32)
    cut = rqjax.truncate(rqjax.append(empty, X, X), np.array([293]))
    own = rqjax.append(empty, X[:, :293], X[:, :293])
    q = X[:, :9]
    found, expected = (rqjax.attend(cache, q, sliding_window=60) for cache in (cut, own))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ValueError, match="expected fewer than 10 queries"):
        rqjax.attend(cut, X[:, :10], sliding_window=60)
    assert rqjax.attend(own, X[:, :16], sliding_window=60).shape == (1, 16, 2, 32)


@pytest.mark.full
def test_a_quantizer_of_cells_for_each_head():
    q = rqjax.lopq(KEY, jax.random.normal(jax.random.key(1), (2, 300, 32)), 2)
    k = jax.random.normal(jax.random.key(2), (2, 80, 2, 32))
    cache = rqjax.append(rqjax.KVCache.init(2, 2, 80, q, q, window=0, sinks=0, dtype=jnp.float32), k, k)
    decoded = q.decode(q.encode(jnp.swapaxes(k, 1, 2)))
    scores = jnp.einsum("bhd,bhtd->bht", k[:, -1], decoded) / 32**0.5
    expected = jnp.einsum("bht,bhtd->bhd", jax.nn.softmax(scores), decoded)
    np.testing.assert_allclose(rqjax.attend(cache, k[:, -1:])[:, 0], expected, atol=1e-4)
