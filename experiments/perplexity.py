"""Perplexity of language models whose keys and values go through a compressed cache.

Each window of held-out text is fed in chunks: the keys and values of a chunk are appended to the cache, then its tokens
attend from the cache and are scored. Nothing is scored that a decoder would not see.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments import models, plot as plots, published, text
from experiments.attention_error import keep
from experiments.rows import mean_and_deviation
from experiments.table import Table
from rqjax import KVCache
from rqjax.nn import Decoder

TABLES = (
    Table(
        "Language models through a compressed cache: change of the perplexity in %, KL of the next-token distribution"
        " (nats), how often the first token is the same",
        rows=("strategy", "bits"),
        columns=(),
        values=("perplexity", "change", "published_change", "kl", "top1"),
        footers=("float_perplexity",),
        each=("model", "keep"),
    ),
)


def check(point: dict[str, Any]) -> None:
    rqjax.strategy(point["strategy"], jax.random.key(0), 64)
    keep(point["keep"])
    if point["context"] % point["chunk"]:
        raise ValueError(f"expected context to be a multiple of chunk = {point['chunk']}, got {point['context']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One strategy on one model, for each of the seeds; a seed draws the quantizers' rotations."""
    family = published.PERPLEXITY.get(point["model"], {})
    result = measure(point, lambda decoder, seed: point["strategy"])
    return {**result, "published_change": family.get(point["strategy"].removesuffix("+centered"))}


def measure(
    point: dict[str, Any], strategy: Callable[[Decoder, int], str | Sequence[rqjax.Strategy]]
) -> dict[str, Any]:
    """Mean and deviation over the seeds of a point; the strategy of each seed as `Decoder.caches` takes it."""
    decoder, windows, exact = _reference(point["model"], point["corpus"], point["context"], point["windows"])
    window, sinks = keep(point["keep"])

    def caches(seed: int) -> tuple[KVCache, ...]:
        batch, key = len(windows), jax.random.key(seed)
        return decoder.caches(strategy(decoder, seed), key, batch, point["context"], window=window, sinks=sinks)

    rows = (_scores(decoder, caches(seed), windows, exact, point["chunk"]) for seed in range(point["seeds"]))
    columns = {name: np.stack(values) for name, values in _transposed(rows).items()}
    nats, reference = columns.pop("nats"), float(_nats(exact, windows[:, 1:]).mean())
    columns |= {"perplexity": np.exp(nats), "change": 100 * (np.exp(nats - reference) - 1)}
    first = caches(0)[0]
    bits = (first.key_quantizer.bits_per_vector + first.value_quantizer.bits_per_vector) / (2 * first.key_quantizer.dim)
    return {**mean_and_deviation(columns), "float_perplexity": float(np.exp(reference)), "bits": round(bits, 3)}


@functools.lru_cache(maxsize=1)
def _reference(name: str, corpus: str, context: int, count: int) -> tuple[Decoder, jax.Array, jax.Array]:
    """The model, windows (n, context + 1) of held-out text, log-probabilities (n, context, vocab) without a cache."""
    decoder, tokenizer = models.load(name)
    windows = jnp.asarray(text.windows(text.held_out(corpus, tokenizer), context, count))
    exact = jax.lax.map(lambda tokens: jax.nn.log_softmax(decoder(tokens[None, :-1])[0])[0], windows)
    return decoder, windows, exact


@functools.partial(jax.jit, static_argnums=4)
def _scores(
    decoder: Decoder, caches: tuple[KVCache, ...], windows: jax.Array, exact: jax.Array, chunk: int
) -> dict[str, jax.Array]:
    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def step(caches: Any, inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        tokens, targets, expected = inputs
        logits, caches = decoder(tokens, caches)
        got = jax.nn.log_softmax(logits)
        return caches, {
            "nats": _nats(got, targets).mean(),
            "kl": jnp.sum(jnp.exp(expected) * (expected - got), axis=-1).mean(),
            "top1": (got.argmax(-1) == expected.argmax(-1)).mean(),
        }

    _, sums = jax.lax.scan(step, caches, (split(windows[:, :-1]), split(windows[:, 1:]), split(exact)))
    return jax.tree.map(jnp.mean, sums)


def _nats(log_probabilities: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


def _transposed(rows: Any) -> dict[str, list[Any]]:
    rows = list(rows)
    return {name: [row[name] for row in rows] for name in rows[0]}


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    merged = [{**row, "metrics": {**row["metrics"], "divergence": row["metrics"]["kl"]}} for row in rows]
    chosen = [row for row in merged if row["point"]["keep"] == rows[0]["point"]["keep"]]
    return [plots.bars(chosen, folder / "kl.png", x="model", y="divergence", series="strategy")]
