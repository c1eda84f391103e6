"""Many texts answered by one engine within one number of bytes for the cache."""

import time
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.data import text
from experiments.harness.table import Table
from experiments.language.generation_throughput import decoder_of
from experiments.models import models
from rqjax import strategy
from rqjax.core import Registry, check_int, nbytes
from rqjax.nn import Decoder, Engine

MADE_BY = ("rqjax/nn/engine.py", "rqjax/nn/decoder.py", "rqjax/paging/*.py", "rqjax/cache/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "Answers to all prompts: tokens made a second, and seconds to the first of each answer; the share of the"
        " prompts that was computed, the rest being found in pages; slots in use, pages in as many bytes, begun again",
        rows=("trace", "strategy"),
        columns=(),
        values=("tokens_per_second", "first_token_s", "computed", "slots_in_use", "pages", "begun_again"),
        each=("model",),
    ),
)
WARM = 400
"""Tokens of a prompt that compiles all sizes of calls but that of one token."""


class Trace(NamedTuple):
    """Texts that go on for some turns, all at once. They begin with one of the documents, if there are any."""

    texts: int
    documents: int
    shared: int
    """Tokens of a document."""
    turns: int
    own: int
    """Tokens that each turn asks, at most."""
    answer: int
    """Tokens of an answer."""

    @property
    def longest(self) -> int:
        return self.shared + self.turns * (self.own + self.answer)


TRACES: Registry = Registry(
    "trace",
    {
        "unshared": Trace(texts=24, documents=0, shared=0, turns=1, own=2048, answer=64),
        # Documents end in the middle between two pages, with sinks and without.
        "documents": Trace(texts=32, documents=8, shared=1088, turns=1, own=128, answer=64),
        "chats": Trace(texts=16, documents=1, shared=576, turns=4, own=128, answer=64),
    },
)


def check(point: dict[str, Any]) -> None:
    TRACES[point["trace"]]
    for name in ("held", "slots"):
        check_int(name, point[name], 1, 2**20)
    strategy(point["strategy"], jax.random.key(0), 64)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures an engine on a trace, in the bytes of `held` of its longest texts in bfloat16."""
    decoder, rng, trace = decoder_of(point["model"], "float32"), np.random.default_rng(0), TRACES[point["trace"]]
    budget = point["held"] * trace.longest * 2 * decoder.config.cached
    options: dict[str, Any] = {"window": 0, "sinks": 0} if point["strategy"] == "bfloat16" else {}
    pages = _pages(decoder, point, trace.longest, budget, options)
    key, tokens = jax.random.key(0), _text(point["model"], decoder, 2**17)

    def engine() -> Engine:
        sizes = {"pages": pages, "slots": point["slots"], "max_len": trace.longest}
        return Engine(decoder, point["strategy"], key, **sizes, **options)

    def piece(count: int) -> list[int]:
        start = rng.integers(len(tokens) - count)
        return tokens[start : start + count].tolist()

    warm = engine()
    for count in (1, WARM, WARM):
        warm.submit(tokens[: min(count, trace.longest - 2)], max_tokens=2)
    warm.run()
    documents = [piece(trace.shared) for _ in range(trace.documents)] or [[]]
    texts, served, begun = [documents[i % len(documents)] for i in range(trace.texts)], engine(), time.perf_counter()
    firsts, running, made, steps, asked = [], 0, 0, 0, 0
    for _ in range(trace.turns):
        texts = [[*text, *piece(rng.integers(1, trace.own + 1))] for text in texts]
        asked += sum(map(len, texts))
        of_id = {served.submit(text, max_tokens=trace.answer, seed=i): i for i, text in enumerate(texts)}
        submitted, answers = time.perf_counter(), [[] for _ in texts]
        while served.running or served.waiting:
            events = served.step()
            running, made, steps = running + served.running, made + len(events), steps + 1
            for event in events:
                if not answers[of_id[event.id]]:
                    firsts.append(time.perf_counter() - submitted)
                answers[of_id[event.id]].append(event.token)
        texts = [[*text, *answer] for text, answer in zip(texts, answers, strict=True)]
    return {
        "tokens_per_second": made / (time.perf_counter() - begun),
        "first_token_s": float(np.mean(firsts)),
        "computed": served.read / asked,
        "slots_in_use": running / steps,
        "pages": pages,
        "begun_again": served.begun - trace.texts * trace.turns,
    }


def _pages(decoder: Decoder, point: dict[str, Any], longest: int, budget: int, options: dict[str, Any]) -> int:
    """Returns as many pages as the bytes hold beside what is held for each slot."""

    def size(pages: int) -> int:
        make = lambda key: decoder.caches(point["strategy"], key, point["slots"], longest, pages=pages, **options)  # noqa: E731
        return nbytes(jax.eval_shape(make, jax.random.key(0)))

    once = size(1)
    return 1 + (budget - once) // (size(2) - once)


def _text(model: str, decoder: Decoder, count: int) -> np.ndarray:
    if model not in models.SHAPES:
        return np.random.default_rng(1).integers(0, decoder.config.vocab_size, count)
    return text.held_out("", models.load(model).tokenizer)[:count]
