"""The engine against the tokens of `generate`, whatever runs beside a request."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.nn import Engine, generate, load_decoder
from rqjax.nn.sampling import next_tokens, sampled
from tests.cache.test_paged import checked
from tests.tools.suites import some

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
KEY = jax.random.key(7)
OPTIONS = {"window": 16, "sinks": 4}


@pytest.fixture(scope="module")
def decoder():
    return load_decoder(CHECKPOINTS / "llama")


def text(seed, length):
    return np.random.default_rng(seed).integers(3, 60, length)


def alone(decoder, strategy, prompt, count, seed=0, stop=(), **sampling):
    """The tokens of `generate`."""
    caches = decoder.caches(strategy, KEY, 1, 1024, **OPTIONS)
    tokens = []
    for token, _ in generate(decoder, caches, prompt, key=jax.random.key(seed), chunk=128, **sampling):
        tokens.append(token)
        if len(tokens) == count or token in stop:
            return tokens
    return tokens


def requests(shared):
    """Prompts, of which some begin alike, with what is asked for."""
    prompts = [text(0, 300), text(1, 40), [*text(0, 290), *text(2, 30)], text(3, 1), [*text(0, 290), *text(4, 5)]]
    return [
        (np.asarray(prompt), {"max_tokens": 6 + i, "temperature": 0.5 * i, "top_p": 0.8 if i == 2 else 1.0, "seed": i})
        for i, prompt in enumerate(prompts if shared else [p for p in prompts if len(p) < 300])
    ]


@pytest.mark.parametrize("strategy", some(("float32", "turboquant_trellis_3", "eden_2+pre_rope"), []))
def test_tokens_are_those_of_each_alone(decoder, strategy):
    """With more requests than slots, prefixes that are shared, and pages for less than all: some are begun again."""
    engine = Engine(decoder, strategy, KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    asked = requests(True)
    before = next_tokens._cache_size()
    ids = [engine.submit(prompt, **options) for prompt, options in asked]
    made = engine.run()
    assert next_tokens._cache_size() - before <= 4  # a chunk, a part of one, a token, a token of all slots
    checked(engine.paged)
    assert engine.paged.free_pages == 6
    for id, (prompt, options) in zip(ids, asked, strict=True):
        options = dict(options)
        assert made[id] == alone(decoder, strategy, prompt, options.pop("max_tokens"), **options), id


@pytest.mark.full
def test_pages_run_out(decoder):
    """Three texts need three pages, of which there are two: the youngest gives its own back and is made again."""
    engine = Engine(decoder, "eden_4", KEY, pages=2, slots=3, max_len=256, chunk=128, **OPTIONS)
    ids = [engine.submit(text(i, 30), max_tokens=40, seed=i) for i in range(3)]
    steps = [[event.id for event in engine.step()] for _ in range(20)]
    assert any(len(step) > 1 for step in steps)
    made = engine.run()
    for i, id in enumerate(ids):
        expected = alone(decoder, "eden_4", text(i, 30), 40, seed=i)
        seen = sum(step.count(id) for step in steps)
        assert made.get(id, []) == expected[seen:]


@pytest.mark.full
def test_codes_degrade_before_texts_wait(decoder):
    """No text is begun again, and what was made before is as alone; a text may need all pages that there will be."""
    levels = {"degrade": ["eden_3", "eden_2"], "max_len": 1024, "chunk": 128}
    engine = Engine(decoder, "eden_4", KEY, pages=4, slots=6, **levels, **OPTIONS)
    size = rqjax.nbytes([(layer.keys, layer.values) for layer in engine.paged.caches])
    ids = [engine.submit(text(i, 80), max_tokens=90, temperature=0) for i in range(3)]
    made = {id: [] for id in ids}
    while not engine.degraded and engine.running + engine.waiting:
        for event in engine.step():
            made[event.id].append(event.token)
    begun = len(made[0]) - 1  # the last step was made with smaller codes
    assert begun > 10
    for i, id in enumerate(ids):
        assert made[id][:begun] == alone(decoder, "eden_4", text(i, 80), len(made[id][:begun]), temperature=0)
    long = engine.submit(text(5, 700), max_tokens=2)
    after = engine.run()
    assert [name for name, _ in engine.degraded] == ["eden_3", "eden_2"]
    assert 4 < engine.degraded[0][1] < engine.degraded[1][1] == engine.paged.pages == engine.paged.free_pages
    assert rqjax.nbytes([(layer.keys, layer.values) for layer in engine.paged.caches]) <= size
    assert engine.begun == 4
    for id, most in [*dict.fromkeys(ids, 90).items(), (long, 2)]:
        tokens = made.get(id, []) + after.get(id, [])
        assert len(tokens) == most or tokens[-1] in decoder.config.eos_token_ids
    checked(engine.paged)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["eden_2", "eden_3"], r"expected degrade= of fewer and fewer bits, got strategies of \[4, 7, 5\] pages"),
        (["kivi_2"], "expected a strategy of 16 tokens"),
    ],
)
def test_what_cannot_degrade_is_refused(decoder, names, message):
    with pytest.raises(ValueError, match=message):
        Engine(decoder, "eden_4", KEY, pages=4, slots=1, chunk=128, degrade=names, **OPTIONS)


def test_stops_and_cancels(decoder):
    engine = Engine(decoder, "float32", KEY, pages=4, slots=2, chunk=128, **OPTIONS)
    expected = alone(decoder, "float32", text(0, 20), 12)
    ids = [engine.submit(text(0, 20), max_tokens=12, stop=[expected[3]]), engine.submit(text(1, 20), max_tokens=9)]
    waiting = engine.submit(text(2, 20), max_tokens=9)
    engine.step()
    engine.cancel(ids[1])
    engine.cancel(waiting)
    assert engine.run() == {ids[0]: expected[: expected.index(expected[3]) + 1]}
    assert (engine.paged.slots, engine.paged.free_pages) == ({}, 4)
    with pytest.raises(ValueError, match=f"request {waiting} is not waiting or running"):
        engine.cancel(waiting)


def test_only_the_likeliest_tokens_are_sampled():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 0)
    keys = jax.random.split(jax.random.key(0), 4000)
    ones = jnp.ones(4000)
    found = np.bincount(sampled(logits, ones, 0.7 * ones, keys), minlength=4) / 4000
    np.testing.assert_allclose(found, [0.625, 0.375, 0, 0], atol=0.03)  # three deviations
    assert (sampled(logits, 0 * ones, ones, keys) == 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], {"max_tokens": 1}), "expected a prompt of at least one token, got none"),
        (
            ([1] * 400, {"max_tokens": 200}),
            "a prompt of 400 tokens and 200 more do not fit in the 512 tokens of a slot",
        ),
        (([1, 96], {"max_tokens": 1}), "expected tokens from 0 to 95, got 1 to 96"),
        (([1], {"max_tokens": 1, "top_p": 0.0}), "expected temperature >= 0 and 0 < top_p <= 1, got 1.0 and 0.0"),
        (([1], {"max_tokens": 0}), "expected max_tokens to be a whole number from 1"),
    ],
)
def test_wrong_requests(decoder, arguments, message):
    engine = Engine(decoder, "float32", KEY, pages=4, slots=1, chunk=128, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        engine.submit(arguments[0], **arguments[1])
    assert engine.step() == []


@pytest.mark.full
def test_a_thousand_requests(decoder):
    """With cancels and stops: each answer is that of the request alone, nothing is compiled anew, no array stays."""
    rng = np.random.default_rng(0)
    engine = Engine(decoder, "float32", KEY, pages=3, slots=4, max_len=192, chunk=128, **OPTIONS)
    kinds = [
        (text(i % 5, int(rng.integers(1, 150))), {"max_tokens": int(rng.integers(1, 6)), "seed": i, "stop": [7, i]})
        for i in range(30)
    ]
    expected = []
    for prompt, options in kinds:
        engine.submit(prompt, **options)
        expected += engine.run().values()
    compiled, arrays = next_tokens._cache_size(), len(jax.live_arrays())
    asked, made, count = {}, {}, 0
    while count < 1000 or engine.waiting or engine.running:
        while count < 1000 and engine.waiting < 4:
            kind = int(rng.integers(len(kinds)))
            asked[engine.submit(kinds[kind][0], **kinds[kind][1])] = kind
            count += 1
        if rng.random() < 0.05 and engine.waiting:
            engine.cancel(engine._waiting[-1].id)
        if rng.random() < 0.05 and engine.running:
            engine.cancel(engine._running[0].id)
        for event in engine.step():
            made.setdefault(event.id, []).append(event.token)
            if event.done:
                assert made.pop(event.id) == expected[asked.pop(event.id)]
    checked(engine.paged)
    assert engine.paged.slots == {}
    assert (next_tokens._cache_size(), len(jax.live_arrays())) == (compiled, arrays)
