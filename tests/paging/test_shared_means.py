"""Prefixes of caches whose keys are encoded relative to a mean of their first tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax

RNG = np.random.default_rng(0)
KEYS, VALUES = RNG.normal(size=(2, 1000, 1, 32)).astype(np.float32)
KEYS += 3
KEYS[900:] -= 27
FIRST, SECOND, THIRD, LAST, OTHER = *np.split(np.arange(664), [132, 388, 644]), np.full(256, 900)


@pytest.mark.full
def test_pages_after_a_cut_do_not_mix_means():
    """The mean is of tokens 4 to 147, the first pages are of tokens 4 to 131: of a text cut at 132 they stay codes."""
    strategy = rqjax.strategy("eden_4+centered", jax.random.key(0), 32)
    pages = rqjax.PagedCache(strategy.cache(3, 1, 1024, pages=24, dtype=jnp.float32), chunk=256)

    def grow(slot, tokens):
        pages.reserve(slot, tokens)
        new = KEYS[tokens][None], VALUES[tokens][None]
        pages.update(rqjax.append(pages.caches, *new, slots=jnp.array([slot])))

    pages.admit([*FIRST, *SECOND])
    grow(0, FIRST)
    grow(0, SECOND)
    pages.admit([*FIRST, *OTHER])
    grow(1, FIRST)
    grow(1, OTHER)
    pages.truncate(1, 132)
    grow(1, SECOND)
    grow(1, THIRD)
    slot, known = pages.admit([*FIRST, *SECOND, *THIRD, *LAST])
    text = np.arange(664)
    grow(slot, text[known : max(known, 388)])
    grow(slot, text[max(known, 388) : 644])
    grow(slot, LAST)
    own = strategy.cache(1, 1, 1024, dtype=jnp.float32)
    for tokens in (FIRST, SECOND, THIRD, LAST):
        own = rqjax.append(own, KEYS[tokens][None], VALUES[tokens][None])
    q = jnp.ones((1, 1, 1, 32))
    found = rqjax.attend(pages.caches, q, slots=jnp.array([slot]))
    np.testing.assert_allclose(found, rqjax.attend(own, q), atol=1e-4)
