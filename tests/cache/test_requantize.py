"""Codes of a cache made anew by other quantizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.cache.test_paged import read
from tests.tools.plain import error
from tests.tools.suites import some

X = np.random.default_rng(0).standard_normal((2, 2, 200, 2, 32)).astype(np.float32)
Q = np.random.default_rng(1).standard_normal((2, 1, 4, 32)).astype(np.float32)


def cache(name, seed=0, **options):
    strategy = rqjax.strategy(name, jax.random.key(seed), 32)
    options = {"rope": rqjax.Rope(1e4), "dtype": jnp.float32, "window": 16, "sinks": 2, **options}
    return strategy, rqjax.append(strategy.cache(2, 2, 256, **options), X[0], X[1])


PAIRS = (("float32", "eden_3"), ("float32", "turboquant_trellis_2/v3_3"), ("float32+pre_rope", "eden_2+pre_rope"))


@pytest.mark.parametrize(("old", "new"), some(PAIRS, []))
def test_from_full_precision_codes_are_those_of_the_tokens(old, new):
    """Decoding by unit vectors is exact but for float32's rounding: at most a few codes at a tie differ."""
    strategy, expected = cache(new)
    found = rqjax.requantize(cache(old, dtype=jnp.float32)[1], strategy)
    assert found.lengths.tolist() == [200, 200]
    assert error(rqjax.attend(found, Q), rqjax.attend(expected, Q)) < 1e-2
    for slot in range(2):
        for a, b in zip(read(found, slot), read(expected, slot), strict=True):
            assert np.mean(np.asarray(a) != np.asarray(b)) < 5e-3


@pytest.mark.full
def test_pages_become_smaller_and_more():
    """Four pages of four bits are less than seven of two; what they hold is the same as without pages."""
    strategy = rqjax.strategy("eden_4", jax.random.key(0), 32)
    less = rqjax.strategy("eden_2", jax.random.key(1), 32)
    paged = rqjax.PagedCache(strategy.cache(2, 2, 256, window=16, sinks=2, pages=4, dtype=jnp.float32), chunk=128)
    for slot in range(2):
        paged.admit([slot])
        paged.reserve(slot, 200)
    paged.update(rqjax.append(paged.caches, X[0], X[1]))
    found = rqjax.requantize(paged.caches, less, pages=7)
    assert rqjax.nbytes((found.keys, found.values)) <= rqjax.nbytes((paged.caches.keys, paged.caches.values))
    alone = rqjax.requantize(cache("eden_4")[1], less)
    assert error(rqjax.attend(found, Q), rqjax.attend(alone, Q)) < 1e-6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivi_2", {}, "expected a strategy of 16 tokens of 32 dimensions, pre_rope=False, got 32 of 32"),
        ("eden_2+pre_rope", {}, "expected a strategy of 16 tokens"),
        ("eden_2", {"pages": 9}, "expected pages of a cache with at most as many, got 9 for 2"),
    ],
)
def test_what_does_not_fit_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        rqjax.requantize(cache("eden_4")[1], rqjax.strategy(name, jax.random.key(0), 32), **options)
