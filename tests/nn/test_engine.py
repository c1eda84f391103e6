"""The engine against the tokens of `generate`, whatever runs beside a request."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rqjax
from rqjax.nn import Engine, engine as engines, generate, load_decoder, sampling
from rqjax.nn.requests import Request
from rqjax.nn.sampling import BEST, Sampling, batched, compiled, logprobs, next_tokens, sampled
from tests.paging.test_paged import checked
from tests.tools import soak
from tests.tools.suites import some

FORWARD = jax.jit(lambda decoder, tokens: decoder(tokens))
SAMPLED = jax.jit(sampled)
CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
KEY = jax.random.key(7)
OPTIONS = {"window": 16, "sinks": 4}
CHOICES = {2: {"top_p": 0.8}, 3: {"top_k": 9}, 4: {"min_p": 0.2}}


@pytest.fixture(scope="module")
def decoder():
    return load_decoder(CHECKPOINTS / "llama")


def text(seed, length):
    return np.random.default_rng(seed).integers(3, 60, length)


def alone(decoder, strategy, prompt, count, seed=0, stop=(), options=OPTIONS, **sampling):
    """Tokens of `generate` for one request alone."""
    caches = decoder.caches(strategy, KEY, 1, 1024, **options)
    tokens = []
    for token, _ in generate(decoder, caches, prompt, key=jax.random.key(seed), chunk=128, **sampling):
        tokens.append(token)
        if len(tokens) == count or token in stop:
            return tokens
    return tokens


def programs():
    return compiled(sampling._next_tokens, "cpu")._cache_size()


def plain(decoder, tokens):
    """Log-probabilities (time, vocabulary) after each token, without caches, in NumPy."""
    logits = np.asarray(FORWARD(decoder, np.pad(tokens, (0, -len(tokens) % 128))[None])[0][0], np.float64)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[: len(tokens)]


def agree(events, expected, first, best):
    """Events have the log-probabilities `expected` after the token before each, from token `first` on."""
    for place, event in enumerate(events, first - 1):
        order = np.argsort(-expected[place], kind="stable")[:best]
        np.testing.assert_allclose(event.logprob, expected[place, event.token], atol=1e-4)
        assert [token for token, _ in event.best] == order.tolist()
        np.testing.assert_allclose([nats for _, nats in event.best], expected[place, order], atol=1e-4)


def requests(shared):
    """Prompts, some of which begin alike, with their options."""
    prompts = [text(0, 300), text(1, 40), [*text(0, 290), *text(2, 30)], text(3, 1), [*text(0, 290), *text(4, 5)]]
    return [
        (np.asarray(prompt), {"max_tokens": 6 + i, "temperature": 0.5 * i, "seed": i} | CHOICES.get(i, {}))
        for i, prompt in enumerate(prompts if shared else [p for p in prompts if len(p) < 300])
    ]


@pytest.mark.parametrize("strategy", some(("eden_2/turboquant_trellis_3+pre_rope",), []))
def test_tokens_are_those_of_each_alone(decoder, strategy):
    """Requests exceed the slots, share prefixes, and have pages for less than all, so that some are begun again."""
    engine = Engine(decoder, strategy, KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    asked = requests(True)
    before = programs()
    ids = [engine.submit(prompt, **options) for prompt, options in asked]
    made = engine.run()
    assert programs() - before <= 4  # a chunk, a part of one, a token, a token of all slots
    checked(engine.paged)
    assert engine.paged.free_pages == 6
    for id, (prompt, options) in zip(ids, asked, strict=True):
        options = dict(options)
        assert made[id] == alone(decoder, strategy, prompt, options.pop("max_tokens"), **options), id


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "options", "found"),
    [("eden_2+centered", {}, 260), ("eden_2+turned", {}, 260), ("bfloat16", {"window": 0}, 388)],
)
def test_prefixes_at_the_default_window(decoder, strategy, options, found):
    """All whole pages are found but the one that fills the window, with the mean that their codes are relative to."""
    engine = Engine(decoder, strategy, KEY, pages=16, slots=2, **options)
    for prompt, known in (([*text(0, 420), 5], 0), ([*text(0, 420), 6, 7], found), (text(0, 388), 260)):
        before, id = engine.read, engine.submit(prompt, max_tokens=9)
        assert engine.run()[id] == alone(decoder, strategy, prompt, 9, options=options)
        assert engine.read - before == len(prompt) - known


@pytest.mark.full
def test_a_step_reads_as_many_tokens_of_prompts_as_it_is_told(decoder):
    """Pieces are of 4, 128, 128 and 40 tokens; the last may pass the number."""
    for step_tokens, reads in ((1, [4, 132, 260, 300, 304]), (132, [132, 300, 432]), (1000, [600])):
        engine = Engine(decoder, "eden_4", KEY, pages=12, slots=2, step_tokens=step_tokens)
        for seed in (0, 1):
            engine.submit(text(seed, 300), max_tokens=2)
        for read in reads:
            engine.step()
            assert engine.read == read


@pytest.mark.full
def test_the_text_admitted_last_gives_its_pages_back(decoder):
    """Three samples need three pages, and there are two: the youngest is made again, before another text, once one is
    done. That text waits until all that it asks for fits beside the others."""
    engine = Engine(decoder, "float32", KEY, pages=2, slots=3, max_len=256, chunk=128, **OPTIONS)
    first = engine.submit(text(0, 30), max_tokens=14, n=3)
    ids = [*range(first, first + 3), engine.submit(text(3, 30), max_tokens=14, seed=3)]
    events = []
    while engine.running + engine.waiting:
        events += engine.step()
    assert [event.id for event in events if event.done] == ids
    assert engine.begun == 5
    for i, id in enumerate(ids):
        made = [event.token for event in events if event.id == id]
        assert made == alone(decoder, "float32", text(i // 3 * 3, 30), 14, seed=i)


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


def test_texts_without_codes_cannot_degrade(decoder):
    with pytest.raises(ValueError, match="degrade= has no codes to make anew: all 16 tokens of a text"):
        Engine(decoder, "eden_4", KEY, pages=4, slots=1, max_len=16, degrade=["eden_3"], **OPTIONS)


@pytest.mark.full
def test_cancels(decoder):
    engine = Engine(decoder, "float32", KEY, pages=4, slots=2, chunk=128, **OPTIONS)
    ids = [engine.submit(text(i, 20), max_tokens=9) for i in range(2)]
    waiting = engine.submit(text(2, 20), max_tokens=9)
    engine.step()
    engine.cancel(ids[1])
    engine.cancel(waiting)
    assert {*engine.run()} == {ids[0]}
    assert (engine.paged.slots, engine.paged.free_pages) == ({}, 4)
    with pytest.raises(ValueError, match=f"request {waiting} is not waiting or running"):
        engine.cancel(waiting)


@pytest.mark.parametrize("strategy", some(("float32",), []))
def test_samples_share_the_pages_of_their_prompt(decoder, strategy):
    """Each is `generate`'s with its own seed. Three slots take three at once, of a prompt that is read once; the fourth
    finds its pages. Samples can be cancelled before they begin."""
    engine = Engine(decoder, strategy, KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    prompt, events = text(0, 300), []
    first = engine.submit(prompt, max_tokens=5, n=5, seed=2**32 - 2)
    assert engine.waiting == 5
    engine.cancel(first + 1)
    while engine.waiting > 1:
        events += engine.step()
        checked(engine.paged)
    assert (engine.running, engine.read) == (3, 300)
    pages = [slot.pages for slot in engine.paged._slots.values()]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    while engine.running or engine.waiting:
        events += engine.step()
    assert engine.read == 300 + 300 - 132  # of the fourth, all but its first page
    for id, seed in ((first, 2**32 - 2), (first + 2, 0), (first + 3, 1), (first + 4, 2)):
        made = [event.token for event in events if event.id == id]
        assert made == alone(decoder, strategy, prompt, 5, seed=seed)
    assert len({event.token for event in events if event.id != first}) > 5
    engine.submit(prompt[:9], max_tokens=1)
    engine.submit(prompt[:20], max_tokens=5, n=3)
    engine.submit(prompt[:9], max_tokens=1)
    engine.cancel(first + 6)
    assert [request.id - first for request in engine._waiting] == [5, 7, 9]  # it keeps its place
    assert {*engine.run()} == {first + 5, first + 7, first + 8, first + 9}
    assert engine.paged.free_pages == 6


@pytest.mark.full
def test_log_probabilities(decoder):
    """Events of made tokens and of a prompt, from its pages or not, have those of the decoder without caches."""
    engine = Engine(decoder, "float32", KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    prompt, events = text(0, 400), []

    def asked(tokens, **options):
        return engine.submit(tokens, **{"max_tokens": 0, **options})

    made = asked(prompt[:300], max_tokens=6, logprobs=3, temperature=0.5, top_k=2)
    scored = asked(prompt, logprobs=2), asked(prompt[:2], logprobs=BEST)
    quiet = asked(text(1, 20), max_tokens=6)
    while engine.running + engine.waiting:
        events += engine.step()
        checked(engine.paged)
    before, end = engine.read, asked(prompt, logprobs=0, score_from=390)
    events += engine.step() + engine.step()
    assert engine.read - before == 400 - 260
    made, whole, short, quiet, end = (
        [event for event in events if event.id == id] for id in (made, *scored, quiet, end)
    )
    agree(made, plain(decoder, [*prompt[:300], *(event.token for event in made)]), 300, 3)
    assert {(event.logprob, event.best) for event in quiet} == {(None, ())}
    expected = plain(decoder, prompt)
    for found, first, last, best in ((whole, 1, 399, 2), (short, 1, 1, BEST), (end, 390, 399, 0)):
        assert [event.token for event in found] == prompt[first : last + 1].tolist()
        assert [event.done for event in found] == [False] * (last - first) + [True]
        agree(found, expected, first, best)


def test_log_probabilities_are_computed_where_they_are_wanted():
    logits, tokens = jax.random.normal(KEY, (2, 50)), jnp.array([3, 4])
    for most in (-1, 0, 3):
        found = logprobs(logits, tokens, jnp.array([-1, most]))
        assert [bool(part.any()) for part in found] == [most >= 0, most > 0, most > 0]


def test_stops(decoder):
    """Tokens or texts end a text, a text that several tokens make too; the last token is the one that completes it."""
    words, options = [f"w{i}," for i in range(96)], {"pages": 6, "slots": 3, "chunk": 128, **OPTIONS}
    engine = Engine(decoder, "float32", KEY, decode=lambda ids: "".join(words[id] for id in ids), **options)
    made = alone(decoder, "float32", text(0, 20), 12)
    said = [words[token] for token in made]
    asked = [
        ([made[5], made[3]], []),
        ((), said[4]),
        ((), ["no", f",{said[6]}{said[7][:1]}"]),
        ([made[3]], f"{said[0]}{said[1]}"),
        ((), ["w96"]),
    ]
    ids = [engine.submit(text(0, 20), max_tokens=12, stop=stop, stop_texts=texts) for stop, texts in asked]
    found = engine.run()
    for id, (stop, texts) in zip(ids, asked, strict=True):
        texts = [texts] if isinstance(texts, str) else texts
        ends = [n for n in range(1, 13) if made[n - 1] in np.ravel(stop) or any(t in "".join(said[:n]) for t in texts)]
        assert found[id] == made[: min(ends, default=12)]
    assert {*map(len, found.values())} >= {2, 12}


@pytest.mark.parametrize("temperature", [0.5, 1, 2])
def test_only_the_likeliest_tokens_are_sampled(temperature):
    """Tokens of all combinations of options are those of a plain loop with the same noise, ties among them."""
    rng, options = np.random.default_rng(0), []
    for top_p in (1, 0.9, 0.3):
        for top_k in (0, 1, 5, 99):
            options += [Sampling(temperature, top_p, top_k, min_p) for min_p in (0, 0.1, 0.5, 1)] * 4
    logits = rng.standard_normal((len(options), 40)).round(1).astype(np.float32)
    keys = jax.random.split(KEY, len(options))
    expected = []
    for row, key, (heat, top_p, top_k, min_p) in zip(logits, keys, options, strict=True):
        chances = np.exp(row.astype(float) / heat)
        order = [int(i) for i in np.argsort(-row, kind="stable") if chances[i] >= min_p * chances.max() * (1 - 1e-6)]
        order, kept, total = order[: top_k or None], [], 0
        while order and total < top_p - 1e-6:
            total += chances[order[0]] / chances[order + kept].sum()
            kept.append(order.pop(0))
        noisy = row + heat * np.asarray(jax.random.gumbel(key, (40,)))
        expected.append(max(kept, key=lambda i: noisy[i]))
    options = batched(options)
    np.testing.assert_array_equal(SAMPLED(logits, options, keys), expected)
    greedy = options._replace(temperature=0 * options.temperature)
    np.testing.assert_array_equal(SAMPLED(logits, greedy, keys), logits.argmax(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], {"max_tokens": 1}), "expected a prompt of at least one token, got none"),
        (
            ([1] * 400, {"max_tokens": 200}),
            "a prompt of 400 tokens and 200 more do not fit in the 512 tokens of a slot",
        ),
        (([1, 96], {"max_tokens": 1}), r"expected tokens from 0 to 95, got \[1, 96\]"),
        (
            ([1], {"max_tokens": 1, "top_p": 0.0}),
            "expected 1e6 >= temperature >= 0 and 0 < top_p <= 1, got 1.0 and 0.0",
        ),
        (([1], {"max_tokens": 0}), "expected max_tokens to be a whole number from 1"),
        (([1.5, 2.0], {"max_tokens": 1}), "expected tokens to be whole numbers, got list"),
        ((np.array([1.5]), {"max_tokens": 1}), "expected tokens to be whole numbers, got float64"),
        (([1, True], {"max_tokens": 1}), "expected tokens to be whole numbers, got list"),
        ((jnp.array([True]), {"max_tokens": 1}), "expected tokens to be whole numbers, got bool"),
        ((np.array([2**33 + 1]), {"max_tokens": 1}), r"expected tokens from 0 to 95, got \[8589934593\]"),
        (([2**70], {"max_tokens": 1}), "expected tokens from 0 to 95, got"),
        (([-100, 1], {"max_tokens": 1}), r"expected tokens from 0 to 95, got \[-100, 1\]"),
        (([[1, 2], [3, 4]], {"max_tokens": 1}), r"expected tokens of one text, .* got shape \(2, 2\)"),
        (([[1, 2], [3]], {"max_tokens": 1}), "expected tokens to be whole numbers, got list"),
        ((np.int32(3), {"max_tokens": 1}), r"expected tokens of one text, .* got shape \(\)"),
        (({"input_ids": [1]}, {"max_tokens": 1}), "expected tokens to be whole numbers, got dict"),
        (("a text", {"max_tokens": 1}), "expected tokens to be whole numbers, got str"),
        ((None, {"max_tokens": 1}), "expected tokens to be whole numbers, got NoneType"),
        (([1], {"max_tokens": 1, "temperature": "hot"}), "expected 1e6 >= temperature >= 0 .* got hot and 1.0"),
        (([1], {"max_tokens": 1, "temperature": np.nan}), "expected 1e6 >= temperature >= 0 .* got nan and 1.0"),
        (([1], {"max_tokens": 1, "temperature": np.inf}), "expected 1e6 >= temperature >= 0 .* got inf and 1.0"),
        (([1], {"max_tokens": 1, "seed": -1}), "expected seed to be a whole number from 0 to 4294967295, got -1"),
        (([1], {"max_tokens": 1, "seed": 2**32}), "expected seed to be a whole number from 0 to 4294967295"),
        (([1], {"max_tokens": 1, "stop": [96]}), r"expected stop from 0 to 95, got \[96\]"),
        (([1], {"max_tokens": 1, "stop": "."}), "expected stop to be whole numbers, got str"),
        (([1], {"max_tokens": 1, "stop_texts": "."}), "stop_texts need an Engine with decode="),
        (([1], {"max_tokens": 1, "stop_texts": ["a", ""]}), r"expected stop_texts to be texts .*, got \['a', ''\]"),
        (([1], {"max_tokens": 1, "stop_texts": [3]}), r"expected stop_texts to be texts .*, got \[3\]"),
        (([1], {"max_tokens": 1, "top_k": -1}), "expected top_k to be a whole number from 0 to 16777216, got -1"),
        (([1], {"max_tokens": 1, "top_k": 2.0}), "expected top_k to be a whole number from 0 to 16777216, got 2.0"),
        (([1], {"max_tokens": 1, "min_p": 1.1}), "expected 0 <= min_p <= 1, got 1.1"),
        (([1], {"max_tokens": 1, "min_p": np.nan}), "expected 0 <= min_p <= 1, got nan"),
        (([1], {"max_tokens": 1, "logprobs": 21}), "expected logprobs to be a whole number from 0 to 20, got 21"),
        (([1], {"max_tokens": 1, "n": 0}), "expected n to be a whole number from 1 to 65536, got 0"),
        (([1, 2], {"max_tokens": 0, "logprobs": 1, "n": 2}), "expected n to be a whole number from 1 to 1, got 2"),
        (([1], {"max_tokens": 0, "logprobs": 1}), "expected a prompt of at least two tokens to score, got one"),
        (
            ([1, 2, 3], {"max_tokens": 0, "logprobs": 1, "score_from": 3}),
            "expected score_from to be a whole number from 1 to 2, got 3",
        ),
        (
            ([1, 2, 3], {"max_tokens": 1, "logprobs": 1, "score_from": 2}),
            "expected score_from to be a whole number from 1 to 1, got 2",
        ),
    ],
)
def test_wrong_requests(decoder, arguments, message):
    engine = Engine(decoder, "float32", KEY, pages=4, slots=1, chunk=128, **OPTIONS)
    with pytest.raises(ValueError, match=message) as raised:
        engine.submit(arguments[0], **arguments[1])
    assert "\n" not in str(raised.value)
    assert (engine.step(), engine.waiting) == ([], 0)


@pytest.mark.full
def test_prompts_as_tokenizers_give_them(decoder):
    """Prompts are `input_ids` of one text, in arrays or lists; seeds may reach their ends, and None is any."""
    engine = Engine(decoder, "float32", KEY, pages=4, slots=2, chunk=128, **OPTIONS)
    prompt = text(0, 20)
    forms = [
        prompt[None],
        [prompt.tolist()],
        jnp.asarray(prompt),
        (np.int8(t) for t in prompt),
        prompt.astype(np.uint8),
    ]
    options = {"max_tokens": 4, "seed": 2**32 - 1, "temperature": np.float32(0.7)}
    for form in forms:
        engine.submit(form, **options)
    expected = alone(decoder, "float32", prompt[None], 4, seed=2**32 - 1, temperature=0.7)
    assert [*engine.run().values()] == [expected] * len(forms)
    for _ in range(2):
        engine.submit(prompt, max_tokens=1, seed=None)
    assert len({request.seed for request in engine._waiting}) == 2


def fails(monkeypatch, wrong):
    """The engine's decoder raises in calls for which `wrong(call, tokens)` says so: "before" or "after" it computes."""
    count = iter(range(1000))

    def called(decoder, tokens, *args):
        when = wrong(next(count), tokens)
        if when == "before":
            raise RuntimeError("failed")
        found = next_tokens(decoder, tokens, *args)
        if when == "after":
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(engines, "next_tokens", called)


@pytest.mark.full
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failure_loses_nothing(decoder, monkeypatch, when):
    """Some calls fail, none twice at a token, when the caches have been donated or not; all answers are those of each
    alone."""
    engine = Engine(decoder, "float32", KEY, pages=4, slots=2, chunk=128, **OPTIONS)
    prompts = [text(0, 20), text(1, 9), text(2, 30)]
    ids = [engine.submit(prompt, max_tokens=5, seed=i) for i, prompt in enumerate(prompts)]
    fails(monkeypatch, lambda call, _: when if call in (0, 2, 6, 11) else None)
    events, failed = [], 0
    while engine.running + engine.waiting:
        try:
            events += engine.step()
        except (RuntimeError, KeyboardInterrupt):
            failed += 1
            assert engine.running == 0
    assert failed == 4
    assert [event.id for event in events if event.done] == ids
    for i, (id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        made = [event.token for event in events if event.id == id]
        assert made == alone(decoder, "float32", prompt, 5, seed=i)
    assert (engine.paged.slots, engine.paged.free_pages) == ({}, 4)
    checked(engine.paged)


def test_a_text_that_cannot_be_decoded_once_is_made_again(decoder):
    calls = iter(range(9))

    def decode(ids):
        assert next(calls) != 2, "no text"
        return ""

    engine = Engine(decoder, "float32", KEY, pages=6, slots=3, chunk=128, decode=decode, **OPTIONS)
    engine.submit(text(0, 20), max_tokens=5, stop_texts="x")
    with pytest.raises(AssertionError, match="no text"):
        engine.run()
    assert engine.run() == {0: alone(decoder, "float32", text(0, 20), 5)}


@pytest.mark.full
def test_a_prompt_that_always_fails_is_dropped(decoder, monkeypatch):
    engine = Engine(decoder, "float32", KEY, pages=4, slots=2, chunk=128, **OPTIONS)
    good, wrong, later = (engine.submit([first, 5, 6], max_tokens=4) for first in (7, 9, 8))
    fails(monkeypatch, lambda _, tokens: "before" if 9 in tokens[:, -3:-2] else None)
    notes = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed") as raised:
            engine.run()
        notes += getattr(raised.value, "__notes__", [])
    assert notes == [f"request {wrong} is dropped"]
    assert engine.run() == {id: alone(decoder, "float32", [first, 5, 6], 4) for id, first in ((good, 7), (later, 8))}


@pytest.mark.full
def test_a_later_piece_or_a_stop_text_that_always_fails_is_dropped(decoder, monkeypatch):
    engine = Engine(decoder, "float32", KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    wrong = engine.submit([*text(0, 200), 9], max_tokens=2)
    stops, good = (engine.submit([first, 5, 6], max_tokens=4) for first in (8, 7))
    ends = Request.ends

    def ended(request, token, decode):
        if request.id == stops and len(request.made) == 2:
            raise RuntimeError("failed")
        return ends(request, token, decode)

    monkeypatch.setattr(Request, "ends", ended)
    fails(monkeypatch, lambda _, tokens: "before" if tokens.shape[1] > 1 and 9 in tokens[:, -1] else None)
    notes = []
    for _ in range(4):
        with pytest.raises(RuntimeError, match="failed") as raised:
            engine.run()
        notes += getattr(raised.value, "__notes__", [])
    assert notes == [f"request {wrong} is dropped", f"request {stops} is dropped"]
    assert engine.run()[good] == alone(decoder, "float32", [7, 5, 6], 4)
    assert not engine.waiting + engine.running


@pytest.mark.full
def test_layers_that_encode_other_numbers_of_tokens_together(decoder):
    """Layers whose units are tiles have fewer pages of a slot."""
    layers = decoder.config.num_hidden_layers
    named = ["float32", "kvarn_4", *["float32"] * layers][:layers]
    strategies = [rqjax.strategy(name, KEY, decoder.config.head_dim) for name in named]
    engine = Engine(decoder, strategies, KEY, pages=8, slots=1, max_len=420, **OPTIONS)
    id = engine.submit(text(0, 300), max_tokens=3)
    assert len(engine.run()[id]) == 3


def changed(decoder, seed, size=0.5, step=1):
    """Adds noise to every `step`-th number of a weight, in place."""
    rng = np.random.default_rng(seed)

    def noisy(x):
        noise = np.zeros(x.size, np.float32)
        noise[::step] = rng.standard_normal(noise[::step].shape)
        return x + size * x.std() * noise.reshape(x.shape)

    nnx.update(decoder, jax.tree.map(noisy, nnx.state(decoder)))
    return decoder


@pytest.mark.full
def test_new_weights_answer_for_themselves():
    """Prefixes computed by old weights are forgotten; a running text goes on as if the new ones had read all of it."""
    model, prompt = load_decoder(CHECKPOINTS / "llama"), text(0, 300)
    engine = Engine(model, "float32", KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    options = {"max_tokens": 6, "temperature": 0}
    engine.submit(prompt, **options)
    engine.run()
    running = engine.submit(prompt, **options)
    begun = [event.token for _ in range(4) for event in engine.step()]
    assert 0 < len(begun) < 6
    changed(model, 1)
    answer, fresh = engine.run()[running], engine.submit(prompt, **options)
    made = engine.run()[fresh]
    assert made == alone(model, "float32", prompt, 6, temperature=0)
    assert made != begun + answer
    longer = [*prompt, *begun]
    expected = alone(model, "float32", longer, len(answer), temperature=0)
    assert answer == expected
    before = engine.paged
    engine.step()
    assert engine.paged is before
    nnx.state(model)["norm"]["weight"].get_value().delete()
    with pytest.raises(RuntimeError, match="expected a decoder with weights, got deleted arrays"):
        engine.step()


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True])
def test_updated_weights(decoder, again):
    """A running text goes on with the keys that it has, or as if the new weights had read all of it. A new one finds
    pages of the new weights alone. Nothing is compiled."""
    model, prompt, options = changed(load_decoder(CHECKPOINTS / "llama"), 1), text(0, 300), {"temperature": 0}
    engine = Engine(decoder, "float32", KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    engine.submit(prompt, max_tokens=9, **options)
    begun = [event.token for _ in range(6) for event in engine.step()]
    assert 0 < len(begun) < 9
    compiled = programs()
    engine.update(model, again=again)
    before, (new, read) = engine.read, (engine.submit(prompt, max_tokens=4, **options), 300 + again * 168)
    made = engine.run()
    assert (programs(), engine.read - before) == (compiled, read)
    checked(engine.paged)
    assert made[new] == alone(model, "float32", prompt, 4, **options)
    caches = decoder.caches("float32", KEY, 1, 1024, **OPTIONS)
    old = generate(decoder, caches, prompt, key=KEY, chunk=128, **options)
    caches = [next(old) for _ in begun][-1][1]
    rest = [
        token for (token, _), _ in zip(generate(model, caches, begun[-1:], key=KEY, **options), made[0], strict=False)
    ]
    if again:
        rest = alone(model, "float32", [*prompt, *begun], 9 - len(begun), **options)
    assert made[0] == rest
    with pytest.raises(ValueError, match="expected a decoder of the config of the one before"):
        engine.update(load_decoder(CHECKPOINTS / "qwen2"))


@pytest.mark.full
def test_files_of_prefixes_are_of_all_weights(decoder, tmp_path):
    """One number of one weight tells decoders apart; the same weights find what another engine saved."""
    prompt = text(0, 300)

    def found(model):
        options = {"pages": 6, "slots": 3, "chunk": 128, "step_tokens": 1, "folder": tmp_path}
        engine = Engine(model, "float32", KEY, **options, **OPTIONS)
        engine.submit(prompt, max_tokens=1)
        engine.step()
        held = max(engine.paged.slots.values())
        engine.run()
        engine.paged.save()
        return held

    assert found(decoder) == 4  # the first piece
    assert found(decoder) > 132
    other = load_decoder(CHECKPOINTS / "llama")
    weight = nnx.state(other)["embed_tokens"]["weight"]
    weight.set_value(weight[...].at[5, 7].add(1e-3))
    nnx.update(other, {"embed_tokens": {"weight": weight}})
    assert found(other) == 4


@pytest.mark.full
def test_requests_of_many_kinds_from_several_threads(decoder, tmp_path):
    """Answers are those of each alone whatever fails; nothing is compiled anew, no array stays."""
    engine = Engine(decoder, "float32", KEY, folder=tmp_path, decode=soak.said, **soak.OPTIONS)
    told = soak.soak(engine, 200, 3)
    assert told["programs"] == 0
    assert told["arrays"] < 20
    assert min(told[name] for name in ("cancelled", "failures", "damaged", "full")) > 0
    assert told["done"] + told["cancelled"] + told.get("dropped", 0) >= 200


@pytest.mark.full
def test_a_text_waits_no_longer_than_it_must(decoder):
    """Each of three texts may need three of six pages; one ends early, and the third takes its place at once."""
    engine = Engine(decoder, "float32", KEY, pages=6, slots=3, chunk=128, **OPTIONS)
    first, *others = (engine.submit(text(i, 10), max_tokens=390, seed=i) for i in range(3))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 1)
    for _ in range(40):  # what they have in pages grows
        engine.step()
    engine.cancel(first)
    engine.step()
    assert (engine.running, engine.waiting) == (2, 0)
    for id in others:
        engine.cancel(id)


@pytest.mark.full
def test_pressure_does_not_forget_the_beginning_of_a_text(decoder):
    """Pages that are free are taken before those of a running text's beginning, whose first piece has none."""
    engine = Engine(decoder, "eden_4", KEY, pages=12, slots=2)
    running = engine.submit(text(0, 700), max_tokens=40)
    engine.step()
    for seed in (1, 2):
        engine.submit(text(seed, 700), max_tokens=1)
        while engine.running + engine.waiting > 1:
            engine.step()
    before = engine.read
    engine.submit(text(0, 700), max_tokens=1)
    while engine.running + engine.waiting > 1:
        engine.step()
    assert engine.read - before == 700 - 516
    engine.cancel(running)
