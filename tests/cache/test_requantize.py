"""Codes of a cache made anew by other quantizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.paging.test_paged import append, padded, read
from tests.tools.plain import error
from tests.tools.suites import some

X = np.random.default_rng(0).standard_normal((2, 2, 200, 2, 32)).astype(np.float32)
Q = np.random.default_rng(1).standard_normal((2, 1, 4, 32)).astype(np.float32)


def grown_by(caches, tokens):
    k, v, valid = padded(tokens)
    return append(caches, k, v, valid=valid, slots=jnp.array([0]))


def cache(name, seed=0, x=X, **options):
    strategy = rqjax.strategy(name, jax.random.key(seed), 32)
    options = {"rope": rqjax.Rope(1e4), "dtype": jnp.float32, "window": 16, "sinks": 2, **options}
    return strategy, rqjax.append(strategy.cache(2, 2, 256, **options), x[0], x[1])


PAIRS = (("float32", "eden_3"), ("float32", "turboquant_trellis_2/v3_3"), ("float32+pre_rope", "eden_2+pre_rope"))


@pytest.mark.parametrize(("old", "new"), some(PAIRS, PAIRS[:1]))
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


@pytest.mark.full
def test_a_token_that_is_not_finite_spoils_no_other():
    less, spoiled, mask = rqjax.strategy("eden_2", jax.random.key(1), 32), X.copy(), np.arange(256) != 60
    spoiled[:, 0, 60, 0, 3] = np.inf
    found, expected = (rqjax.requantize(cache("eden_4", x=x)[1], less) for x in (spoiled, X))
    assert error(rqjax.attend(found, Q, mask=mask), rqjax.attend(expected, Q, mask=mask)) < 1e-6


@pytest.mark.full
def test_a_book_goes_on_with_other_quantizers(tmp_path):
    """There are more pages, of the codes of `rqjax.requantize`; prefixes are still found; the folder is left."""
    less, strategy = (rqjax.strategy(name, jax.random.key(i), 32) for i, name in enumerate(("eden_2", "eden_4")))
    empty = strategy.cache(2, 2, 512, pages=4, window=16, sinks=2, dtype=jnp.float32)
    paged, start = rqjax.PagedCache(empty, chunk=128, folder=tmp_path), 0
    paged.admit(range(400))
    for end in paged.pieces(0, 400):
        paged.reserve(0, range(start, end))
        paged.update(grown_by(paged.caches, range(start, end)))
        start = end
    expected = rqjax.requantize(paged.caches, less, pages=7)
    paged.requantize(less, 7)
    assert (paged.pages, paged.free_pages) == (7, 4)
    for a, b in zip(jax.tree.leaves(paged.caches), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert paged.admit(range(400)) == (1, 258)
    with pytest.raises(ValueError, match="expected a PagedCache with a folder"):
        paged.save()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivi_2", {}, "expected a strategy of 16 tokens of 32 dimensions, got 32 of 32"),
        ("eden_2+pre_rope", {}, r"expected a strategy for keys AsGiven\(\), got BeforeRope\(\)"),
        ("eden_2", {"pages": 9}, "expected pages of a cache with at most as many, got 9 for 2"),
    ],
)
def test_requantize_rejects_incompatible_strategies(name, options, message):
    with pytest.raises(ValueError, match=message):
        rqjax.requantize(cache("eden_4")[1], rqjax.strategy(name, jax.random.key(0), 32), **options)
