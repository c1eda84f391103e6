"""Caches that keep a window of tokens and forget older ones, against a plain cache that forgets nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.plain import PlainCache, error
from tests.tools.suites import some

DIM, SEEN, LONG = 32, 60, 640
CALLS = (50, 180, 1, 16, 17), (300, 1), (1, 16, 50, 180, 3, 90)
OPTIONS = {"none": {}, "softcap": {"softcap": 5.0, "scale": 0.5}, "sinks": {"sink_logits": np.array([0.5, -1, 2, 0])}}
call = jax.jit(functools.partial(rqjax.dot_product_attention, sliding_window=SEEN))
EXACT = rqjax.Exact(DIM, "float32")


def made(batch=2, max_len=LONG, **options):
    options = {"sinks": 4, "dtype": jnp.float32, "sliding_window": SEEN, **options}
    return rqjax.KVCache.init(batch, 2, max_len, EXACT, EXACT, **options)


def tokens(count, batch=2):
    rng = np.random.default_rng(count)
    return [rng.standard_normal((batch, count, heads, DIM)).astype(np.float32) for heads in (4, 2, 2)]


@pytest.mark.parametrize("options", some(OPTIONS, ["none"]))
@pytest.mark.parametrize("which", some(range(3), [0]))
def test_calls_of_any_length(which, options):
    """One call of a whole text, or pieces shorter and longer than the window."""
    cache, options = made(), {name: np.float32(x) for name, x in OPTIONS[options].items()}
    plain = PlainCache(cache)
    for count in CALLS[which]:
        q, k, v = tokens(count)
        out, cache = call(q, k, v, cache, **options)
        plain.append(k, v)
        assert error(out, plain.attend(q, own=True, sliding_window=SEEN, **options)) < 1e-5


def test_padding_and_a_mask():
    cache = made()
    plain = PlainCache(cache)
    mask = np.random.default_rng(0).random((1, 1, 1, LONG)) < 0.7
    for count in (90, 8, 100):
        q, k, v = tokens(count)
        valid = np.array([count, count - 7])
        out, cache = call(q, k, v, cache, valid=valid, mask=jnp.asarray(mask))
        plain.append(k, v, valid=valid)
        expected = plain.attend(q, own=True, mask=mask, sliding_window=SEEN)
        assert error(out[0], expected[0]) < 1e-5
        assert error(out[1, 7:], expected[1, 7:]) < 1e-5


@pytest.mark.parametrize("dropped", [1, 15])
def test_a_draft_is_dropped(dropped):
    cache = made()
    plain = PlainCache(cache)
    for count in (200, dropped):
        q, k, v = tokens(count)
        _, cache = call(q, k, v, cache)
        plain.append(k, v)
    lengths = np.array([200, 200 + dropped])
    cache = jax.jit(rqjax.truncate)(cache, jnp.asarray(lengths))
    plain.truncate(lengths)
    assert (cache.lengths.tolist(), cache.overflow.any()) == (lengths.tolist(), False)
    q, k, v = tokens(2)
    out, cache = call(q, k, v, cache)
    plain.append(k, v)
    assert error(out, plain.attend(q, own=True, sliding_window=SEEN)) < 1e-5


def test_what_is_forgotten_does_not_come_back():
    _, k, v = tokens(200)
    cache = rqjax.append(made(), k, v)
    with pytest.raises(ValueError, match="the 60 tokens before each end are not forgotten, got"):
        rqjax.truncate(cache, np.array([200, 184]))
    cut = jax.jit(rqjax.truncate)(cache, jnp.array([200, 184]))
    assert (cut.lengths.tolist(), cut.overflow.tolist()) == ([200, 200], [False, True])
    with pytest.raises(ValueError, match="truncated to tokens that are forgotten"):
        rqjax.append(cut, k[:, :1], v[:, :1])
    begun = rqjax.truncate(cache, np.array([0, 3]))  # the sinks are still there
    plain = PlainCache(cache)
    plain.append(k, v)
    plain.truncate([0, 3])
    q, k, v = tokens(70)
    out, _ = call(q, k, v, begun)
    plain.append(k, v)
    assert error(out, plain.attend(q, own=True, sliding_window=SEEN)) < 1e-5


def test_bytes_do_not_grow_with_the_text():
    """A strategy makes codes of the whole text where these take fewer bytes."""
    assert made(max_len=100_000).nbytes == made().nbytes
    strategy = rqjax.strategy("hadamard_4+pre_rope", jax.random.key(0), DIM)
    make = functools.partial(strategy.cache, 1, 2, rope=rqjax.Rope(1e4), sliding_window=300)
    short, long = make(400), make(4000)
    assert (short.sliding_window, short.capacity, short.key_form.rope) == (None, 256, rqjax.Rope(1e4))
    assert (long.sliding_window, long.capacity, long.key_form.rope) == (300, 0, None)
    assert long.exact_keys.shape == (1, 2, 4 + 300 + 16, DIM)
    assert long.nbytes < strategy.cache(1, 2, 4000, rope=rqjax.Rope(1e4)).nbytes


def test_files_growth_and_other_quantizers(tmp_path):
    _, k, v = tokens(200)
    cache = rqjax.append(made(), k, v)
    rqjax.save(cache, tmp_path / "cache")
    assert rqjax.load(tmp_path / "cache").sliding_window == SEEN
    assert rqjax.requantize(cache, rqjax.strategy("eden_2", jax.random.key(0), DIM)) is cache
    more = rqjax.grow(cache, 1000)
    assert (more.max_len, more.nbytes) == (1024, cache.nbytes)


def test_gradients_of_a_call():
    """Gradients are those of exact attention to what is seen."""
    cache = call(*tokens(100, 1), made(1))[1]
    plain = PlainCache(made(1))
    plain.append(*tokens(100, 1)[1:])
    q, k, v = tokens(40, 1)

    def mine(v):
        return (call(q, k, v, cache)[0] ** 2).sum()

    def theirs(v):
        keys, values = (jnp.concatenate([x[0], y[0]]) for x, y in ((plain.keys, k), (plain.values, v)))
        age = 100 + jnp.arange(40)[:, None] - jnp.arange(140)
        scores = jnp.einsum("qghd,khd->ghqk", q[0].reshape(40, 2, 2, DIM).swapaxes(1, 2), keys) / DIM**0.5
        weights = jax.nn.softmax(jnp.where((age >= 0) & (age < SEEN), scores, -jnp.inf))
        return (jnp.einsum("ghqk,khd->qghd", weights, values) ** 2).sum()

    np.testing.assert_allclose(jax.grad(mine)(v), jax.grad(theirs)(v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: made(sliding_window=0), "sliding_window"),
        (lambda: made(key_form=rqjax.BeforeRope(rope=rqjax.Rope(1e4))), "expected Exact keys as given"),
        (lambda: rqjax.attend(made(), tokens(1)[0]), "sliding_window of at most the 60 tokens that are kept, got None"),
        (lambda: rqjax.attend(made(), tokens(1)[0], sliding_window=61), "got 61"),
        (lambda: rqjax.attend(made(), tokens(17)[0], sliding_window=60), "at most 16 queries at once, or dot_product"),
        (lambda: rqjax.append(made(max_len=100), *tokens(101)[1:]), "at most max_len = 100"),
        (lambda: rqjax.PagedCache(made(pages=4)), "expected a layer with pages"),
    ],
)
def test_wrong_use_is_one_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
