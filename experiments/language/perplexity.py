"""Perplexity of language models whose keys and values go through a compressed cache.

Each window of held-out text is fed in chunks: the keys and values of a chunk are appended to the cache, then its tokens
attend from the cache and are scored. Nothing is scored that a decoder would not see. Deviations are over the windows,
whose rotations differ too: each seed draws those of its share of the windows.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.caches.attention_error import keep
from experiments.data import text
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.language import models
from rqjax import KVCache
from rqjax.nn import Decoder

TABLES = (
    Table(
        "Language models through a compressed cache: change of the perplexity in %, KL of the next-token distribution"
        " (nats), how often the first token is the same; ± over windows of held-out text",
        rows=("strategy", "bits"),
        columns=(),
        values=("perplexity", "change", "kl", "top1"),
        footers=("float_perplexity",),
        each=("model", "keep"),
    ),
)


def check(point: dict[str, Any]) -> None:
    rqjax.strategy(point["strategy"], jax.random.key(0), 64)
    keep(point["keep"])
    if point["context"] % point["chunk"]:
        raise ValueError(f"expected context to be a multiple of chunk = {point['chunk']}, got {point['context']}")
    check_windows(point)


def check_windows(point: dict[str, Any]) -> None:
    if point["windows"] % point["seeds"]:
        raise ValueError(f"expected windows to be a multiple of seeds = {point['seeds']}, got {point['windows']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One strategy on one model."""
    return measure(point, lambda decoder, seed: point["strategy"])


def measure(
    point: dict[str, Any], strategy: Callable[[Decoder, int], str | Sequence[rqjax.Strategy]]
) -> dict[str, Any]:
    """Of all windows together, and the deviation of each window's own; the strategy of a seed as `Decoder.caches` takes
    it."""
    decoder, windows, exact = _reference(point["model"], point["corpus"], point["context"], point["windows"])
    seeds, (window, sinks) = point["seeds"], keep(point["keep"])

    def caches(seed: int) -> tuple[KVCache, ...]:
        batch, key = len(windows) // seeds, jax.random.key(seed)
        return decoder.caches(strategy(decoder, seed), key, batch, point["context"], window=window, sinks=sinks)

    rows = [
        _scores(decoder, caches(seed), windows[seed::seeds], exact[seed::seeds], point["chunk"])
        for seed in range(seeds)
    ]
    columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    nats, reference = columns.pop("nats"), columns.pop("reference")

    def perplexities(nats: Any, reference: Any) -> dict[str, Any]:
        own, exact = np.exp(nats), np.exp(reference)
        return {"perplexity": own, "float_perplexity": exact, "change": 100 * (own / exact - 1)}

    result = mean_and_deviation(columns | perplexities(nats, reference))
    result |= {name: float(value) for name, value in perplexities(nats.mean(), reference.mean()).items()}
    first = caches(0)[0]
    bits = (first.key_quantizer.bits_per_vector + first.value_quantizer.bits_per_vector) / (2 * first.key_quantizer.dim)
    return {**result, "bits": round(bits, 3)}


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
    """Means over the tokens of each window."""

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def step(caches: Any, inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        tokens, targets, expected = inputs
        logits, caches = decoder(tokens, caches)
        got = jax.nn.log_softmax(logits)
        each = {
            "nats": _nats(got, targets),
            "reference": _nats(expected, targets),
            "kl": jnp.sum(jnp.exp(expected) * (expected - got), axis=-1),
            "top1": got.argmax(-1) == expected.argmax(-1),
        }
        return caches, {name: x.mean(axis=-1) for name, x in each.items()}

    _, means = jax.lax.scan(step, caches, (split(windows[:, :-1]), split(windows[:, 1:]), split(exact)))
    return {name: x.mean(axis=0) for name, x in means.items()}


def _nats(log_probabilities: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """The divergence by stored bits, a line for each family of strategies."""
    kept = [row for row in rows if row["point"]["keep"] == rows[0]["point"]["keep"]]
    left_out = (".", "+", "affine", "rotor_chain", "orthogonal")  # fractional bits, and what the table has
    plain = [row for row in kept if not any(mark in row["point"]["strategy"] for mark in left_out)]
    return [by_bits(plain, folder / "kl.png")]


def by_bits(rows: list[dict[str, Any]], path: Path) -> Path:
    """The divergence of the next token by stored bits, a line for each strategy without its bits."""
    named = [
        {
            "point": {**row["point"], "family": row["point"]["strategy"].rstrip("0123456789.").rstrip("_")},
            "metrics": {**row["metrics"], "divergence": row["metrics"]["kl"], "stored_bits": row["metrics"]["bits"]},
        }
        for row in rows
    ]
    return plots.curves(named, path, x="stored_bits", y="divergence", series="family", panel="model", log=True)
