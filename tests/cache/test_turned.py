"""Caches that know rotary positions: turned means, and codes of keys before they turn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.plain import error
from tests.tools.suites import some

BATCH, HEADS, DIM, TIME = 2, 2, 64, 200
ROPE = rqjax.Rope(1e4)
append = jax.jit(rqjax.append)
attend = jax.jit(rqjax.attend, static_argnames=("sliding_window", "softcap"))


@functools.cache
def tokens():
    """Queries, keys with a strong mean before they turn, values; numbers of bfloat16, so that storing costs nothing."""
    q, k, v = np.random.default_rng(0).standard_normal((3, BATCH, TIME, HEADS, DIM)).astype(np.float32)
    k = k + 6 * np.random.default_rng(1).standard_normal((HEADS, DIM)).astype(np.float32)
    return q.repeat(2, axis=2), k, v


def made(name, rope=ROPE, *, seed=0, batch=BATCH, window=16, sinks=2, **options):
    strategy = rqjax.strategy(name, jax.random.key(seed), DIM)
    return strategy.cache(batch, HEADS, 256, rope=rope, window=window, sinks=sinks, dtype=jnp.float32, **options)


def codes(cache):
    return jax.tree.leaves((cache.keys, cache.values))


def exact(q, k, v, rope=ROPE, count=1, sliding_window=None, softcap=None):
    """Attention of the last `count` queries, in float64."""
    time = k.shape[1]
    positions = np.arange(time)[None, :, None]
    q, k = (np.asarray(rope(x, positions), np.float64) for x in (q, k))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q[:, -count:], k) / np.sqrt(DIM)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    age = np.arange(time)[-count:, None] - np.arange(time)
    scores = np.where((age >= 0) & (age < (sliding_window or time)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


ROPES = {
    "default": ROPE,
    "llama3": rqjax.Rope(5e5, "llama3", (8.0, 1.0, 4.0, 128.0)),
    "linear": rqjax.Rope(1e4, "linear", (4.0,)),
    "yarn": rqjax.Rope.parse(1e4, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "half of the coordinates": rqjax.Rope(1e4, share=0.5),
}


EXACT = ("eden_8+turned", "eden_8+pre_rope", "eden_8+pre_rope+centered")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "rope"),
    some(
        [*((EXACT[2], rope) for rope in ROPES), *((name, "default") for name in EXACT[:2])],
        [(EXACT[2], "half of the coordinates")],
    ),
)
def test_eight_bits_are_exact_attention(name, rope):
    """An error of a hundredth is what eight bits cost."""
    q, k, v = tokens()
    cache = append(made(name, ROPES[rope]), k, v)
    assert error(attend(cache, q[:, -3:]), exact(q, k, v, ROPES[rope], 3)) < 0.01 * (
        1 + 5 * (name == "eden_8+pre_rope")
    )


@pytest.mark.full
@pytest.mark.parametrize("options", [{"sliding_window": 60}, {"softcap": 3.0}])
@pytest.mark.parametrize("name", EXACT[::2])
def test_windows_and_soft_limits(name, options):
    q, k, v = tokens()
    cache = append(made(name), k, v)
    assert error(attend(cache, q[:, -3:], **options), exact(q, k, v, count=3, **options)) < 0.01


CHUNKED = ("eden_2+turned", "eden_2+pre_rope+centered", "turboquant_trellis_2+pre_rope")


@pytest.mark.parametrize("name", some(CHUNKED, []))
def test_chunks_and_padding_give_the_same_codes(name):
    _, k, v = tokens()
    whole = append(made(name), k, v)
    parts = made(name)
    for part in np.split(np.arange(TIME), [1, 18, 19, 150]):
        parts = append(parts, k[:, part], v[:, part])
    for a, b in zip(
        jax.tree.leaves((whole.keys, whole.values)), jax.tree.leaves((parts.keys, parts.values)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    padded = np.concatenate([np.full((1, 50, HEADS, DIM), 1e3, np.float32), k[1:, :150]], axis=1)
    ragged = append(made(name), np.concatenate([k[:1], padded]), v, valid=jnp.array([TIME, 150]))
    alone = append(made(name, batch=1), k[1:, :150], v[1:, 50:])
    for a, b in zip(
        jax.tree.leaves((ragged.keys, ragged.values)), jax.tree.leaves((alone.keys, alone.values)), strict=True
    ):
        np.testing.assert_array_equal(a[1:], b)


@pytest.mark.parametrize("name", some(("eden_2/float32", "eden_3/float32"), []))
def test_a_mean_that_turns_is_subtracted_before_it_does(name):
    """A 37th of the energy of keys is left, a sixth of the error, of which softmax makes a third. The mean of the keys
    after they turned does not help. Of one rotation the ratio is 0.1 to 0.45, so four are taken."""
    q, k, v = tokens()

    def loss(name):
        caches, positions = [made(name, seed=seed) for seed in range(4)], np.arange(TIME)[None, :, None]
        queries, keys = (x if caches[0].key_form.rope else ROPE(x, positions) for x in (q, k))
        found = [attend(append(cache, keys, v), queries[:, -1:]) for cache in caches]
        return np.mean([error(each, exact(q, k, v)) for each in found])

    assert loss(f"{name}+turned") < 0.4 * min(loss(name), loss(f"{name}+centered"))


@pytest.mark.full
def test_a_cache_in_full_precision_takes_a_rope():
    q, k, v = tokens()
    full = rqjax.Exact(DIM, "float32")
    options = {"window": 4, "sinks": 1, "key_form": rqjax.AsGiven(rope=ROPE), "dtype": jnp.float32}
    cache = rqjax.KVCache.init(BATCH, HEADS, 256, full, full, **options)
    out, cache = rqjax.dot_product_attention(q[:, :150], k[:, :150], v[:, :150], cache)
    out, cache = rqjax.dot_product_attention(q[:, 150:], k[:, 150:], v[:, 150:], cache)
    assert error(out, exact(q, k, v, count=50)) < 1e-5


@pytest.mark.full
def test_saved_and_loaded(tmp_path):
    """A saved prefix goes on at its own positions."""
    q, k, v = tokens()
    cache = append(made("eden_2+turned"), k[:, :150], v[:, :150])
    rqjax.save(cache, tmp_path / "cache.safetensors")
    again = rqjax.load(tmp_path / "cache.safetensors")
    assert again.key_form.rope == ROPE
    found, expected = (attend(append(c, k[:, 150:], v[:, 150:]), q[:, -1:]) for c in (again, cache))
    np.testing.assert_array_equal(found, expected)


def test_key_forms_reject_invalid_arguments():
    with pytest.raises(ValueError, match=r"expected a rope for keys in the form TurnedMean\(learned\), got none"):
        made("eden_2+turned", None)
    with pytest.raises(ValueError, match=r"expected a rope for keys in the form BeforeRope\(\), got none"):
        rqjax.KVCache.init(1, 1, 256, rqjax.Exact(64), rqjax.Exact(64), key_form=rqjax.BeforeRope())
    with pytest.raises(ValueError, match="expected TurnedMean with a mean, or learned=True"):
        rqjax.TurnedMean(rope=ROPE)
    with pytest.raises(ValueError, match="expected a mean or learned=True, not both"):
        made("eden_2", key_form=rqjax.SubtractedMean(jnp.ones((HEADS, DIM)), learned=True))
    with pytest.raises(ValueError, match="expected a rope that turns an even number of 64 coordinates, got 65"):
        made("eden_2+turned", rqjax.Rope(1e4, share=1.02))
    with pytest.raises(rqjax.UnknownName, match="turned"):
        rqjax.strategy("eden_2+turnd", jax.random.key(0), 64)
