"""Unseen tokens change nothing, whatever their bits: 0 times not-a-number is not a number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.cache.kv import over
from rqjax.scoring.tiles import UNIT
from tests.cache.test_cache import BIAS, TEXTS, attend, attend_anew, of_kind, tolerance, truncate
from tests.tools.plain import PlainCache, error

TIME, BAD, SPOILED = 450, (60, 90), (np.inf, np.nan)
"""Length of the texts, two tokens of the first sequence that lie in codes, and their numbers, which are not finite."""


def spoiled_text(kind):
    cache, groups = of_kind(kind, 600)
    q, k, v = TEXTS[0][:, :TIME].repeat(groups, axis=2), TEXTS[1][:, :TIME] + BIAS, TEXTS[2][:, :TIME].copy()
    for token, number in zip(BAD, SPOILED, strict=True):
        k[0, token, 0, 3] = v[0, token, 0, 5] = number
    return cache, q, k, None if cache.values_in_keys else v


def with_junk(cache):
    """Sets all bits to 1 where no token lies, which is not-a-number for floats."""
    coded = np.asarray(cache.coded)

    def of(leaf):
        bits = np.array(leaf.bits)
        for b, stop in enumerate(coded // leaf.tokens_per_entry):
            at = [b] + [slice(None)] * (bits.ndim - 1)
            at[leaf.axis] = slice(stop, None)
            bits[tuple(at)] = np.nan if bits.dtype == np.float32 else ~np.zeros((), bits.dtype)
        return dataclasses.replace(leaf, bits=jnp.asarray(bits))

    empty = np.asarray(cache.exact_tokens())[:, None, :, None] < 0
    keys, values = (jnp.where(empty, jnp.nan, x) for x in (cache.exact_keys, cache.exact_values))
    codes = over(of, cache.keys), over(of, cache.values)
    return dataclasses.replace(cache, keys=codes[0], values=codes[1], exact_keys=keys, exact_values=values)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["affine", "trellis", "transform", "balanced", "latent", "pre_rope"])
def test_tokens_that_are_not_finite(kind):
    """They come after a query, are masked, lie before a window, or are dropped; and so does what was never written."""
    cache, q, k, v = spoiled_text(kind)
    plain, close = PlainCache(cache), tolerance(kind)
    out, cache = attend_anew(q, k, v, cache)
    plain.append(k, v, mean=cache.key_form.mean)
    expected = plain.attend(q, own=True)
    assert error(out[1], expected[1]) < close
    assert error(out[0, : BAD[0]], expected[0, : BAD[0]]) < close
    if cache.unit == UNIT and kind != "blocks":  # tiles that share scales count it as zeros, formats have no such code
        assert not np.isfinite(out[0, -1]).all()
    mask = ~np.isin(np.arange(cache.max_len), BAD)
    q = q[:, -3:]
    for hidden in (cache, with_junk(cache)):
        assert error(attend(hidden, q, mask=mask), plain.attend(q, mask=mask)) < close
        assert error(attend(hidden, q, sliding_window=300), plain.attend(q, sliding_window=300)) < close
    shorter = with_junk(truncate(cache, np.array([50, 444])))
    plain.truncate([50, 444])
    assert error(attend(shorter, q), plain.attend(q)) < close
    more = (k[:, :129], None if v is None else v[:, :129])
    shorter = rqjax.append(shorter, *(x if x is None else np.nan_to_num(x, posinf=0) for x in more))
    plain.append(*(x if x is None else np.nan_to_num(x, posinf=0) for x in more), mean=shorter.key_form.mean)
    assert error(attend(shorter, q), plain.attend(q)) < close


def test_a_mean_outlives_the_tokens_it_is_of():
    """Tokens that are not finite are no part of the mean."""
    cache, _, k, v = spoiled_text("centered")
    assert BAD[1] < cache.sinks + cache.window
    found = rqjax.append(cache, k, v).key_form.mean[0, 0]
    some_tokens = np.setdiff1d(np.arange(cache.sinks, cache.sinks + cache.window + cache.unit), BAD)
    np.testing.assert_allclose(found, k[0, some_tokens, 0].mean(0), atol=1e-5)


@pytest.mark.full
def test_gradients_know_nothing_of_what_is_hidden():
    cache, q, k, v = spoiled_text("affine")
    mask = ~np.isin(np.arange(cache.max_len), BAD)
    loss = jax.grad(lambda q, cache: jnp.sin(rqjax.attend(cache, q, mask=mask)).sum())
    spoiled = loss(q[:, -3:], rqjax.append(cache, k, v))
    k, v = (np.nan_to_num(x, posinf=0) for x in (k, v))
    np.testing.assert_allclose(spoiled, loss(q[:, -3:], rqjax.append(cache, k, v)), atol=1e-5)
