"""Bits for each layer's keys and values: budgets, losses that are what caches lose, wrong input."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.nn import advise
from rqjax.nn.advise import named_at, rates, sensitivities
from rqjax.recipes.allocation import least_loss
from tests.nn.test_calibration import KEY, checkpoint
from tests.tools.suites import some

pytestmark = pytest.mark.full
KEEP = {"window": 4, "sinks": 1}


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
    return sensitivities(quiet[0], quiet[1], KEY, family="eden", **KEEP)


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


@pytest.mark.parametrize("family", some(["eden", "eden+turned", "eden/eden+pre_rope"], ["eden/eden+pre_rope"]))
def test_losses_are_those_of_a_layer_attending_to_decoded_vectors(family):
    """Oracle: all scores of a layer, with keys or values that are encoded and decoded by hand outside of the window."""
    model, tokens, _ = checkpoint("llama")
    found, rate = sensitivities(model, tokens, KEY, family=family, **KEEP), 3
    strategies = model.calibrate(tokens, named_at(family, rate, rate), KEY)
    token = np.arange(tokens.shape[1])
    age, positions = token[:, None] - token, token[:, None]
    near = (age < KEEP["window"]) | (token < KEEP["sinks"])

    def coded(layer, side, before, v):
        rope, one = model.config.ropes[layer], strategies[layer]
        if side == "values":
            return one.values.decode(one.values.encode(v))
        mean = jnp.zeros(before.shape[2:]) if one.key_form.mean is None else one.key_form.mean
        if family.endswith("+pre_rope"):
            return rope(one.keys.decode(one.keys.encode(before - mean)) + mean, positions)
        mean = rope(jnp.broadcast_to(mean, before.shape), positions)
        return one.keys.decode(one.keys.encode(rope(before, positions) - mean)) + mean

    def logits(which=None):
        def attend(layer, q, k, v):
            rope, scale = model.config.ropes[layer], model.attention_options(layer)["scale"]
            far = {"keys": rope(k, positions), "values": v}
            if which and which[0] == layer:
                far[which[1]] = coded(*which, k, v)
            each = [rope(k, positions), far["keys"], v, far["values"]]
            keys, far_keys, values, far_values = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in each)
            product = functools.partial(jnp.einsum, "bthd,bshd->bhts", rope(q, positions))
            scores = scale * jnp.where(near, product(keys), product(far_keys))
            weights = jax.nn.softmax(jnp.where(age >= 0, scores, -jnp.inf), axis=-1)
            sides = (near, values), (~near, far_values)
            return sum(jnp.einsum("bhts,bshd->bthd", weights * here, x) for here, x in sides)

        return jax.nn.log_softmax(model.logits(model.hidden(tokens, attend)))

    exact = logits()
    for layer, side in itertools.product(range(2), ("keys", "values")):
        expected = jnp.sum(jnp.exp(exact) * (exact - logits((layer, side))), axis=-1).mean()
        kl = found.kl[layer, ("keys", "values").index(side), rates(family).index(rate)]
        np.testing.assert_allclose(kl, expected, rtol=1e-2)


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
        (lambda: advise(model, tokens, KEY, bits=3, family="eden"), "expected more than 132 tokens in a row"),
        (lambda: found.under(1), "at least 1.5 bits a number, scales included, the least of eden, got 1"),
        (lambda: model.calibrate(tokens, ["eden_3"], KEY), "expected 2 names, one a layer, got 1"),
    ]
    for call, text in cases:
        with pytest.raises((ValueError, LookupError), match=re.escape(text)) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_layers_that_keep_a_window_count_in_no_budget():
    """Gemma 3's first layer sees 16 tokens: only the bits of the second are chosen, and only they are stored."""
    model, *_ = checkpoint("gemma3_text")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 96, (2, 128)))
    found = sensitivities(model, tokens, KEY, family="eden", **KEEP)
    assert found.measured.tolist() == [False, True]
    advice = found.under(3.5)
    assert (advice.rates[0].tolist(), found.kl[0].any()) == ([5, 5], False)
    strategies = model.calibrate(tokens, advice.names, KEY)
    assert stored_bits(strategies[1:]) == pytest.approx(advice.bits)
    assert [cache.sliding_window for cache in model.caches(strategies, KEY, 1, 4096)] == [16, None]
