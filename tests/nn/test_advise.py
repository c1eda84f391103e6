"""Bits for each layer's keys and values: budgets, losses that are what caches lose, wrong input."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.nn import advise
from rqjax.nn.advise import divergence, named_at, rates, sensitivities
from rqjax.recipes.allocation import least_loss
from tests.nn.test_calibration import KEY, checkpoint
from tests.tools.suites import some

pytestmark = pytest.mark.full

BOTH = "eden_3/eden_2+pre_rope"
"""Strategy with different codes for keys and values, and keys before they turn."""


def stored_bits(strategies):
    """Bits a number in real codes, from the bytes of a thousand vectors."""
    parts = [part for one in strategies for part in (one.keys, one.values)]
    x = jnp.ones((1000, parts[0].dim))
    codes = [jax.eval_shape(part.encode, x) for part in parts]
    return np.mean([rqjax.nbytes(code) * 8 / x.size for code in codes])


@pytest.fixture(scope="module")
def quiet():
    """A decoder whose second layer hardly matters, and text."""
    model, tokens, _ = checkpoint("llama")
    weight = model.layers[1].self_attn.o_proj.weight
    weight.value = weight[...] * 0.01
    return model, tokens


@pytest.fixture(scope="module")
def found(quiet):
    return sensitivities(quiet[0], quiet[1], KEY, family="eden")


def test_a_layer_that_hardly_matters_gets_the_fewest_bits(found):
    assert found.kl.shape == found.bits.shape == (2, 2, len(rates("eden")))
    advice = found.under(3.5)
    assert advice.rates[1].max() < advice.rates[0].min()
    assert advice.kl.sum() < found.kl[:, :, rates("eden").index(3)].sum()


def test_the_budget_is_kept_by_real_bytes(quiet, found):
    for bits in (1.5, 2.2, 3, 5):
        advice = found.under(bits)
        strategies = quiet[0].calibrate(quiet[1], advice.names, KEY)
        assert stored_bits(strategies) == pytest.approx(advice.bits)
        assert bits - 0.5 < advice.bits <= bits
    uniform, advised = (
        quiet[0].calibrate(quiet[1], "eden_2", KEY),
        quiet[0].calibrate(quiet[1], found.under(2.5).names, KEY),
    )
    assert quiet[0].cache_nbytes(advised, 1, 4096) <= 1.1 * quiet[0].cache_nbytes(uniform, 1, 4096)  # 2.5 with scales


def test_marginal_gains_find_the_least_loss():
    """Marginal gains find the best of all combinations, for convex losses and steps of the same cost."""
    rng = np.random.default_rng(0)
    costs = np.tile(np.arange(1.0, 5), (4, 1))
    losses = np.cumsum(np.sort(rng.exponential(size=(4, 4)), axis=1), axis=1)[:, ::-1]
    for budget in range(4, 17):
        chosen = least_loss(costs, losses, budget)
        own = np.take_along_axis(losses, chosen[:, None], 1).sum()
        every = [np.array(some) for some in itertools.product(range(4), repeat=4) if sum(some) + 4 <= budget]
        assert own == pytest.approx(min(losses[range(4), some].sum() for some in every))
    flat = least_loss(np.array([[1.0, 2, 3]]), np.array([[1.0, 0.99, 0.1]]), 3)  # the point above the hull is left out
    assert flat.tolist() == [2]
    assert least_loss(np.array([[1.0, 2]]), np.array([[1.0, 1]]), 9).tolist() == [0]  # nothing for nothing


@pytest.mark.parametrize("name", some(["eden_2", "eden_2+turned", BOTH], [BOTH]))
def test_the_divergence_is_what_caches_lose(name):
    """A unit of tokens is in codes from the moment it is full; the last of them alone are exact."""
    model, tokens, logits = checkpoint("llama")
    strategies = model.calibrate(tokens, name, KEY)
    caches = model.caches(strategies, KEY, *tokens.shape, window=0, sinks=0, dtype=jnp.float32)
    out, _ = jax.jit(lambda model, tokens, caches: model(tokens, caches))(model, tokens, caches)
    exact, got = jax.nn.log_softmax(logits), jax.nn.log_softmax(out)
    expected = jnp.sum(jnp.exp(exact) * (exact - got), axis=-1)
    coded = int(caches[0].unit) * (tokens.shape[1] // int(caches[0].unit))
    assert coded == tokens.shape[1]
    np.testing.assert_allclose(divergence(model, tokens, strategies), expected, rtol=0.02, atol=1e-5)


def test_names_of_families():
    assert named_at("eden+turned", 2.5, 3) == "eden_2.5/eden_3+turned"
    assert named_at("klt_trellis/eden+pre_rope", 2, 3) == "klt_trellis_2/eden_3+pre_rope"
    assert 2.5 in rates("eden")
    assert 2.5 not in rates("eden/rotorquant")


def test_advise_rejects_invalid_arguments(found):
    model, tokens, _ = checkpoint("llama")
    cases = [
        (lambda: advise(model, tokens, KEY, bits=3, family="edn"), "unknown family 'edn'; did you mean 'eden'"),
        (lambda: advise(model, tokens, KEY, bits=3, family="eden_3"), "unknown family 'eden_3'; did you mean 'eden'"),
        (lambda: advise(model, tokens, KEY, bits=3, family="eden+cent"), "did you mean 'centered'"),
        (lambda: advise(model, tokens[:1, :9], KEY, bits=3, family="eden"), "expected at least 32 tokens"),
        (lambda: found.under(1), "at least 1.5 bits a number, scales included, the least of eden, got 1"),
        (lambda: model.calibrate(tokens, ["eden_3"], KEY), "expected 2 names, one a layer, got 1"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, LookupError), match=re.escape(text)) as raised:
            call()
        assert "\n" not in str(raised.value)
