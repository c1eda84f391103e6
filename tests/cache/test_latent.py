"""Caches whose values are parts of their keys (multi-head latent attention)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.backends import nests
from tests.tools.plain import error
from tests.tools.suites import some

BATCH, HEADS, TURNING, LATENT, TIME = 2, 8, 32, 64, 200
DIM = TURNING + LATENT
ROPE = rqjax.Rope(1e4, share=TURNING / DIM)
append = jax.jit(rqjax.append)
attend = jax.jit(rqjax.attend, static_argnames=("sliding_window", "softcap"))
RNG = np.random.default_rng(0)
KEYS = RNG.standard_normal((BATCH, TIME, 1, DIM)).astype(np.float32) + 2 * RNG.standard_normal(DIM).astype(np.float32)
QUERIES = RNG.standard_normal((BATCH, 3, HEADS, DIM)).astype(np.float32)


def made(name, batch=BATCH, *, max_len=256, **options):
    strategy = rqjax.strategy(name, jax.random.key(0), DIM, latent=LATENT)
    options = {"rope": ROPE, "window": 16, "sinks": 2, "dtype": jnp.float32, **options}
    return strategy.cache(batch, 1, max_len, **options)


def exact(q, k):
    """Attention of the last queries, in float64."""
    scores = np.einsum("bqhd,bkd->bhqk", q.astype(np.float64), k[:, :, 0]) / np.sqrt(DIM)
    seen = np.arange(k.shape[1]) <= k.shape[1] - q.shape[1] + np.arange(q.shape[1])[:, None]
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    return np.einsum("bhqk,bkd->bqhd", weights / weights.sum(-1, keepdims=True), k[:, :, 0, TURNING:])


LEAVES = (
    "eden_4",
    "v2_lean/nvfp4",
    "turboquant_trellis_3",
    "nested_e8_3",
    "kivi_2/turboquant_prod_3",
    "bfloat16/eden_2",
)


@pytest.mark.full
@pytest.mark.parametrize("name", some(LEAVES, LEAVES[1:2]))
def test_both_products_are_with_the_same_codes(name):
    cache = append(made(name, rope=None, window=0, sinks=0), KEYS[:, :192])
    assert cache.values == ()
    assert cache.exact_values.size == 0
    quantizer = cache.key_quantizer
    decoded = quantizer.decode(quantizer.encode(np.swapaxes(KEYS[:, :192], 1, 2)))
    found = attend(cache, QUERIES[:, :1])
    assert found.shape == (BATCH, 1, HEADS, LATENT)
    assert error(found, exact(QUERIES[:, :1], np.swapaxes(decoded, 1, 2))) < 5e-4


EXACT = ("float32", "eden_8", "eden_8+centered", "eden_8+turned", "eden_8+pre_rope+centered")


@pytest.mark.parametrize("name", some(EXACT, ["float32"]))
def test_eight_bits_are_exact_attention(name):
    """The first coordinates turn, before a cache or in it. A mean that is no part of codes is one of values, too."""
    positions, cache = np.arange(TIME)[None, :, None], made(name)
    turned = np.asarray(ROPE(QUERIES, positions[:, -3:])), np.asarray(ROPE(KEYS, positions))
    q, k = turned if cache.key_form.rope is None else (QUERIES, KEYS)
    assert error(attend(append(cache, k), q), exact(*turned)) < (1e-6 if name == "float32" else 0.01)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"sliding_window": 60}, {"softcap": 3.0}, {"sink_logits": np.ones(HEADS, "f4")}])
def test_options_are_those_of_keys_and_values_apart(options):
    apart = rqjax.strategy("float32", jax.random.key(0), DIM).cache(BATCH, 1, 256, window=16, sinks=2)
    found = attend(append(made("float32"), KEYS), QUERIES, **options)
    assert error(found, attend(append(apart, KEYS, KEYS), QUERIES, **options)[..., TURNING:]) < 1e-6


@pytest.mark.full
def test_files_and_other_quantizers(tmp_path):
    cache = append(made("eden_4"), KEYS)
    rqjax.save(cache, tmp_path / "cache")
    loaded = rqjax.load(tmp_path / "cache")
    np.testing.assert_array_equal(attend(loaded, QUERIES), attend(cache, QUERIES))
    fewer = rqjax.strategy("eden_2/eden_3", jax.random.key(1), DIM, latent=LATENT)
    smaller = rqjax.requantize(cache, fewer)
    assert smaller.nbytes < cache.nbytes
    assert 0.05 < error(attend(smaller, QUERIES), attend(cache, QUERIES)) < 0.5


def test_bytes_of_a_long_text():
    """Bytes of a layer, window included, with latents of 512 and 64 rotary coordinates, as DeepSeek's."""
    size = lambda name: rqjax.strategy(name, jax.random.key(0), 576, latent=512).nbytes(1, 1, 8192)  # noqa: E731
    assert size("bfloat16") > 3.5 * size("rotorquant_trellis_4")
    assert size("bfloat16") > 6.5 * size("rotorquant_trellis_2")


def test_kernels_say_why_they_do_not_take_them():
    reason = nests.reason_of_queries(made("eden_4"), 1, HEADS, None, None, None, turns=True)
    assert reason == "values depend on the codes of the keys"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: rqjax.append(made("eden_4"), KEYS, KEYS), "values are parts of the keys: expected v=None"),
        (lambda: rqjax.strategy("eden_4", jax.random.key(0), 64, latent=64), "expected latent to be .* from 1 to 63"),
        (
            lambda: rqjax.KVCache.init(1, 1, 256, rqjax.Exact(64, "float32"), rqjax.LastPart()),
            "expected a Split as key_quantizer",
        ),
        (
            lambda: rqjax.requantize(made("eden_4"), rqjax.strategy("eden_2", jax.random.key(0), DIM)),
            "expected a strategy with LastPart.. as this cache, got values",
        ),
        (lambda: rqjax.attend(made("eden_4"), QUERIES[..., :LATENT]), r"expected q of shape \(2, time"),
    ],
)
def test_wrong_use_is_one_line(wrong, message):
    with pytest.raises(ValueError, match=message) as caught:
        wrong()
    assert "\n" not in str(caught.value)
