"""Perplexity through caches whose quantizers have learned from the model's own keys and values.

Quantizers are fitted to each layer and head, for keys and for values, on training text; the perplexity is that of
held-out text, as in `perplexity`.
"""

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.caches import fitted
from experiments.caches.attention_error import keep
from experiments.harness.table import Table
from experiments.language import perplexity
from experiments.language.models import calibration
from rqjax.nn import Decoder

TABLES = (
    Table(
        "Random and learned quantizers: change of the perplexity in %, KL of the next-token distribution (nats), how"
        " often the first token is the same, ± over windows of held-out text; seconds to fit all layers and heads",
        rows=("bits", "strategy"),
        columns=(),
        values=("perplexity", "change", "kl", "top1", "seconds"),
        footers=("float_perplexity",),
        each=("model", "keep"),
    ),
)


def check(point: dict[str, Any]) -> None:
    keep(point["keep"])
    perplexity.check_windows(point)
    fitted.check(point["strategy"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One strategy on one model; a seed draws rotations and batches."""
    recipe = fitted.recipe(point["strategy"])
    if recipe is None:
        return {**perplexity.measure(point, lambda decoder, seed: point["strategy"]), "seconds": None}
    start = time.perf_counter()
    layers = jax.block_until_ready(fit(point["model"], point["corpus"], point["context"], *recipe, point["seeds"]))
    seconds = time.perf_counter() - start

    def strategies(decoder: Decoder, seed: int) -> list[rqjax.Strategy]:
        def one(stacked: Any) -> rqjax.PerHead:
            return rqjax.PerHead(jax.tree.map(lambda leaf: leaf[seed], stacked))

        return [rqjax.Strategy(one(keys), one(values)) for keys, values in layers]

    return {**perplexity.measure(point, strategies), "seconds": seconds}


@functools.lru_cache(maxsize=1)
def fit(model: str, corpus: str, context: int, recipe: str, bits: int, seeds: int) -> list[tuple[Any, Any]]:
    """Quantizers of keys and of values of each layer; their arrays are (seeds, heads, ...)."""
    arrays = calibration(model, corpus, context, 3)
    layers = 1 + max(int(name.split(".")[1]) for name in arrays)

    def one(layer: int, kind: str) -> Any:
        x = jnp.swapaxes(arrays[f"layers.{layer}.{kind}"], 0, 1)
        stack = jnp.tile(x, (seeds, 1, 1))
        inner = rqjax.FITTED[recipe](jax.random.key(layer), stack, bits).inner
        return jax.tree.map(lambda leaf: leaf.reshape(seeds, len(x), *leaf.shape[1:]), inner)

    return [(one(layer, "k"), one(layer, "v")) for layer in range(layers)]


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    return [perplexity.by_bits(rows, folder / "kl.png")]
