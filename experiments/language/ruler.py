"""RULER-style tasks (Hsieh et al., 2024) on decoders whose keys and values go through a compressed cache.

A text is read in chunks into a cache that has room for all of it, and the likeliest tokens follow. The score of an
example is the share of its answers that the replies contain. Every strategy gets the same examples.

The decoder of `needle_model`, trained for recall, knows keys and values and no other words. Its needles are pairs among
pairs: of all that a text has told one is asked for (`niah_multikey`), or one after the other (`niah_multiquery`).
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from experiments.caches.attention_error import keep
from experiments.data import ruler
from experiments.data.ruler import Example, Turn
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.language import needle_model
from experiments.language.perplexity import training_text
from experiments.models import fitted, models, reading
from rqjax import KVCache
from rqjax.core import unknown_name
from rqjax.nn import Decoder

MADE_BY = (
    "experiments/data/ruler.py",
    "experiments/models/reading.py",
    "experiments/models/models.py",
    "rqjax/recipes/strategies.py",
    "rqjax/recipes/methods.py",
    "rqjax/recipes/klt.py",
)
TABLES = (
    Table(
        "Long-context tasks through a compressed cache: share of the answers in the replies, ± over seeds",
        rows=("strategy",),
        columns=(),
        values=("score", *ruler.TASKS),
        each=("model", "tokens", "keep"),
    ),
)


def check(point: dict[str, Any]) -> None:
    fitted.check(point["strategy"])
    keep(point["keep"])
    for task in _tasks(point):
        _examples(point["model"], task, point["tokens"], point["corpus"], 1, 0)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Scores each task, and their mean, for each of the seeds; a seed draws rotations and `examples` examples."""
    decoder, tokenizer = _model(point["model"])
    tasks, (window, sinks) = _tasks(point), keep(point["keep"])

    def one(seed: int) -> list[float]:
        key = jax.random.key(seed)
        strategy = fitted.strategies(decoder, point["strategy"], key, functools.partial(_learned_from, point, seed))

        def score(task: str) -> float:
            examples = _examples(point["model"], task, point["tokens"], point["corpus"], point["examples"], seed)
            rooms = [example.room for example in examples]  # all get the largest
            longest = point["tokens"] + len(examples[0].turns) * (max(rooms) - min(rooms))
            caches = decoder.caches(strategy, key, len(examples), longest, window=window, sinks=sinks)
            return float(np.mean(_scores(decoder, tokenizer, caches, examples, point["chunk"])))

        return [score(task) for task in tasks]

    columns = np.array([one(seed) for seed in range(point["seeds"])]).T
    jax.clear_caches()  # or many rows have more executables than Linux has mappings of memory for a process
    return mean_and_deviation({"score": columns.mean(axis=0), **dict(zip(tasks, columns, strict=True))})


@functools.lru_cache(maxsize=1)
def _model(name: str) -> models.Model:
    return models.load(name)


def _of_pairs(model: str) -> bool:
    """Returns whether the model has the words of `needle_model`."""
    return _model(model).tokenizer.get_vocab() == needle_model.tokenizer().get_vocab()


def _tasks(point: dict[str, Any]) -> list[str]:
    """Returns the tasks that are named; if none is, all that the model has words for."""
    known = list(_ASKED if _of_pairs(point["model"]) else ruler.TASKS)
    for name in point["tasks"]:
        if name not in known:
            raise unknown_name(f"task of {point['model']}", name, known)
    return list(point["tasks"]) or known


_ASKED = {"niah_multikey": lambda tokens: ((tokens - 3) // 3, 1), "niah_multiquery": lambda tokens: (tokens // 6,) * 2}
"""Functions from a number of tokens to numbers of pairs that are told, and of keys whose value is asked for. Both take
three tokens each."""


def _pairs(task: str, tokens: int, rng: np.random.Generator) -> Example:
    """Makes an example of `needle_model`'s pairs, of which there are no more than keys."""
    told, asked = (min(count, needle_model.KEYS) for count in _ASKED[task](tokens))
    if asked < 1 or told < 1:
        raise ValueError(f"expected at least 6 tokens for {task}, got {tokens}")
    sequence = needle_model.words(needle_model.sequences(rng, 1, told)[0])
    context, questions = sequence[: 3 * told], np.reshape(sequence[3 * told :], (-1, 3))[:asked].tolist()
    texts = [[*(context if i == 0 else []), ask, key] for i, (ask, key, _) in enumerate(questions)]
    turns = (Turn(" ".join(text), (answer,)) for text, (*_, answer) in zip(texts, questions, strict=True))
    return Example(tuple(turns), room=1)


@functools.lru_cache(maxsize=64)
def _examples(model: str, task: str, tokens: int, corpus: str, count: int, seed: int) -> list[Example]:
    rngs = [np.random.default_rng((seed, i)) for i in range(count)]
    if _of_pairs(model):
        return [_pairs(task, tokens, rng) for rng in rngs]
    tokenizer = _model(model).tokenizer
    return [ruler.make(task, lambda text: tokenizer.encode(text).ids, tokens, rng, corpus) for rng in rngs]


def _learned_from(point: dict[str, Any], seed: int) -> jax.Array:
    """Returns tokens (n, time) that quantizers are fitted to: training text, or other pairs."""
    if _of_pairs(point["model"]):
        pairs = min(point["tokens"] // 6, needle_model.KEYS)
        return jnp.asarray(needle_model.sequences(np.random.default_rng((3, seed)), 16, pairs))
    return training_text(point["model"], point["corpus"], point["tokens"])


def _scores(
    decoder: Decoder, tokenizer: Tokenizer, caches: tuple[KVCache, ...], examples: list[Example], chunk: int
) -> list[float]:
    """Computes the share of each example's answers that its replies contain; upper and lower case are the same."""
    room = max(example.room for example in examples)
    found: list[list[bool]] = [[] for _ in examples]
    made = np.zeros((len(examples), 0), int)
    for i in range(len(examples[0].turns)):
        texts = [tokenizer.encode(example.turns[i].text, add_special_tokens=i == 0).ids for example in examples]
        # The last token of a reply is not in the cache yet.
        texts = [[*new[-1:], *text] for new, text in zip(made.tolist(), texts, strict=True)]
        counts = np.array([len(text) for text in texts])
        token, caches = reading.read(decoder, caches, reading.padded(texts, chunk), counts, chunk)
        tokens = [token]
        for _ in range(room - 1):
            token, caches = reading.follow(decoder, caches, token)
            tokens.append(token)
        made = np.concatenate(tokens, axis=1)
        for example, new, hits in zip(examples, made, found, strict=True):
            reply = tokenizer.decode(new[: example.room].tolist()).lower()
            hits += [answer.lower() in reply for answer in example.turns[i].answers]
    return [float(np.mean(hits)) for hits in found]


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    if len({row["point"]["tokens"] for row in rows}) == 1:
        return []
    path, note = folder / "score.png", "bars: deviation over draws"
    return [plots.curves(rows, path, x="tokens", y="score", series="strategy", panel="model", note=note)]
