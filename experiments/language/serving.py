"""Many prompts with a common beginning, answered by one engine within one number of bytes for the cache."""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from experiments.data import text
from experiments.harness.table import Table
from experiments.language.generation_throughput import decoder_of
from experiments.models import models
from rqjax import strategy
from rqjax.core import check_int, nbytes
from rqjax.nn import Decoder, Engine

MADE_BY = ("rqjax/nn/engine.py", "rqjax/nn/decoder.py", "rqjax/paging/*.py", "rqjax/cache/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "Answers to all prompts: tokens made and read a second, slots in use, pages in as many bytes, begun again",
        rows=("strategy",),
        columns=(),
        values=("tokens_per_second", "read_per_second", "slots_in_use", "pages", "begun_again"),
        each=("model",),
    ),
    Table(
        "One prompt alone, its common beginning unknown and known: seconds to the first token, and their ratio",
        rows=("strategy",),
        columns=(),
        values=("first_token_s", "known_first_token_s", "sooner"),
        each=("model",),
    ),
)
WARM = 400
"""Tokens of a prompt that compiles all sizes of calls."""


def check(point: dict[str, Any]) -> None:
    for name in ("requests", "shared", "own", "answer", "held", "slots"):
        check_int(name, point[name], 1, 2**20)
    strategy(point["strategy"], jax.random.key(0), 64)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures a trace of requests that are all there from the beginning."""
    decoder, rng = decoder_of(point["model"], "float32"), np.random.default_rng(0)
    longest = point["shared"] + point["own"] + point["answer"]
    budget = point["held"] * longest * 2 * decoder.config.cached  # in bfloat16
    options: dict[str, Any] = {"window": 0, "sinks": 0} if point["strategy"] == "bfloat16" else {}

    def engine(pages: int) -> Engine:
        key = jax.random.key(0)
        return Engine(decoder, point["strategy"], key, pages=pages, slots=point["slots"], max_len=longest, **options)

    pages = _pages(decoder, point, longest, budget, options)
    tokens = _text(point["model"], decoder, 2**17)
    common = tokens[: point["shared"]]
    own = [int(n) for n in rng.integers(1, point["own"] + 1, point["requests"])]
    starts = rng.integers(point["shared"], len(tokens) - point["own"], point["requests"])
    prompts = [[*common, *tokens[start : start + n]] for start, n in zip(starts, own, strict=True)]

    warm = engine(pages)
    warm.submit(tokens[:WARM], max_tokens=2)
    warm.run()
    one = engine(pages)
    first = [_seconds_to_first(one, [*common, *tokens[start : start + 64]]) for start in starts[:2]]
    all_of_it = engine(pages)
    for i, prompt in enumerate(prompts):
        all_of_it.submit(prompt, max_tokens=point["answer"], seed=i)
    begun, running, made, steps = time.perf_counter(), 0, 0, 0
    for events in _steps(all_of_it):
        running, made, steps = running + all_of_it.running, made + len(events), steps + 1
    seconds = time.perf_counter() - begun
    return {
        "tokens_per_second": made / seconds,
        "read_per_second": sum(map(len, prompts)) / seconds,
        "slots_in_use": running / steps,
        "pages": pages,
        "begun_again": all_of_it.begun - point["requests"],
        "first_token_s": first[0],
        "known_first_token_s": first[1],
        "sooner": first[0] / first[1],
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


def _seconds_to_first(engine: Engine, prompt: list[int]) -> float:
    engine.submit(prompt, max_tokens=1)
    begun = time.perf_counter()
    engine.run()
    return time.perf_counter() - begun


def _steps(engine: Engine) -> Iterator[list[Any]]:
    while engine.running or engine.waiting:
        yield engine.step()
