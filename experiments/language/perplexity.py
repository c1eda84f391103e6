"""Perplexity of language models whose keys and values go through a compressed cache.

Each window of held-out text is fed in chunks. The keys and values of a chunk are appended to the cache, then its tokens
attend from the cache and are scored. Nothing is scored that a decoder would not see. Deviations are over the windows,
whose rotations differ too: each seed draws those of its share of the windows.

Quantizers that learn, and the mean of a strategy with ":calibrated" behind it, are fitted to each layer on training
text, for each seed anew.
"""

import functools
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.caches.attention_error import keep
from experiments.data import text
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models import fitted, models
from rqjax import KVCache, dot_product_attention
from rqjax.nn import Decoder
from rqjax.quantizers.formats import FORMATS
from rqjax.rotations import Rope

MADE_BY = (
    "experiments/models/models.py",
    "rqjax/recipes/strategies.py",
    "rqjax/recipes/methods.py",
    "rqjax/recipes/learned.py",
    "rqjax/recipes/klt.py",
)
TABLES = (
    Table(
        "Language models through a compressed cache: KL of the next-token distribution (nats), mean, median and that of"
        " the worst token in a thousand, how often the first token is the same, perplexity and its change in %; ± over"
        " windows of held-out text; seconds to fit what learns, all seeds",
        rows=("strategy", "bits"),
        columns=(),
        values=("kl", "kl_median", "kl_999", "top1", "perplexity", "change", "seconds_to_fit"),
        footers=("float_perplexity",),
        each=("model", "keep"),
    ),
)


CALIBRATION = 3
"""Windows of training text that quantizers are fitted to."""


def check(point: dict[str, Any]) -> None:
    fitted.check(point["strategy"])
    keep(point["keep"])
    if point["context"] % point["chunk"]:
        raise ValueError(f"expected context to be a multiple of chunk = {point['chunk']}, got {point['context']}")
    if point["windows"] % point["seeds"]:
        raise ValueError(f"expected windows to be a multiple of seeds = {point['seeds']}, got {point['windows']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one strategy on one model: all windows together, and deviations over single windows."""
    decoder, windows, exact = _reference(point["model"], point["corpus"], point["context"], point["windows"])
    seeds, (window, sinks) = point["seeds"], keep(point["keep"])
    tokens = functools.partial(training_text, point["model"], point["corpus"], point["context"])
    seconds = 0.0

    def one(seed: int) -> tuple[dict[str, Any], float]:
        """Returns the scores of a seed's windows, and the stored bits."""
        nonlocal seconds
        key, start = jax.random.key(seed), time.perf_counter()
        strategy = jax.block_until_ready(fitted.strategies(decoder, point["strategy"], key, tokens))
        seconds += 0 if isinstance(strategy, str) else time.perf_counter() - start
        count = len(windows) // seeds
        caches = decoder.caches(strategy, key, count, point["context"], window=window, sinks=sinks)
        first = caches[0]
        parts = (first.key_quantizer, first.key_quantizer if first.values_in_keys else first.value_quantizer)
        bits = sum(part.bits_per_vector / part.dim for part in parts) / 2
        return _scores(decoder, caches, windows[seed::seeds], exact[seed::seeds], point["chunk"]), bits

    rows, bits = zip(*(one(seed) for seed in range(seeds)), strict=True)
    jax.clear_caches()  # or forty rows have more executables than Linux has mappings of memory for a process
    kl = np.concatenate([row.pop("kl_of_tokens") for row in rows], axis=None)
    columns = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    nats, reference = columns.pop("nats"), columns.pop("reference")

    def perplexities(nats: Any, reference: Any) -> dict[str, Any]:
        own, exact = np.exp(nats), np.exp(reference)
        return {"perplexity": own, "float_perplexity": exact, "change": 100 * (own / exact - 1)}

    result = mean_and_deviation(columns | perplexities(nats, reference))
    result |= {name: float(value) for name, value in perplexities(nats.mean(), reference.mean()).items()}
    result |= {"kl_median": float(np.median(kl)), "kl_999": float(np.quantile(kl, 0.999))}
    return {**result, "bits": round(bits[0], 3), "seconds_to_fit": seconds or None}


@functools.lru_cache(maxsize=1)
def training_text(name: str, corpus: str, context: int) -> jax.Array:
    """Returns tokens (n, context) that the model was trained on, to fit quantizers to."""
    tokens = text.seen(corpus, models.load(name).tokenizer)
    return jnp.asarray(text.windows(tokens, context, CALIBRATION)[:, :-1])


@functools.lru_cache(maxsize=1)
def _reference(name: str, corpus: str, context: int, count: int) -> tuple[Decoder, jax.Array, jax.Array]:
    """Returns a model, windows (n, context + 1) of held-out text, exact log-probabilities (n, context, vocab)."""
    decoder, tokenizer = models.load(name)
    windows = jnp.asarray(text.windows(text.held_out(corpus, tokenizer), context, count))
    exact = jax.lax.map(lambda tokens: jax.nn.log_softmax(decoder(tokens[None, :-1])[0])[0], windows)
    return decoder, windows, exact


def _scores(
    decoder: Decoder, caches: tuple[KVCache, ...], windows: jax.Array, exact: jax.Array, chunk: int
) -> dict[str, Any]:
    """Computes means over the tokens of each window, and the divergence of each token.

    All tokens go through a layer before the next one begins. Layers that are alike then share one program. In a
    whole decoder each of them is compiled.
    """
    x = decoder.embedded(windows[:, :-1])
    for layer, (block, cache) in enumerate(zip(decoder.layers, caches, strict=True)):
        options = decoder.attention_options(layer)
        sinks = options.pop("sink_logits")
        x = _through(*nnx.split(block), x, cache, sinks, decoder.config.ropes[layer], tuple(options.items()), chunk)
    return _compared(decoder, x, windows, exact, chunk)


@functools.partial(jax.jit, static_argnums=(0, 5, 6, 7))
def _through(
    graph: Any,
    state: Any,
    x: jax.Array,
    cache: KVCache,
    sinks: jax.Array | None,
    rope: Rope,
    options: tuple[tuple[str, Any], ...],
    chunk: int,
) -> jax.Array:
    """Runs a layer on the tokens x (n, context, size), which attend from its cache."""
    block = nnx.merge(graph, state)

    def step(cache: KVCache, x: jax.Array) -> tuple[KVCache, jax.Array]:
        positions, kept = cache.lengths[:, None, None] + jnp.arange(chunk)[:, None], []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            if cache.key_form.rope is None:
                q, k = rope(q, positions), rope(k, positions)
            value = None if cache.values_in_keys else v
            out, new = dot_product_attention(q, k, value, cache, sink_logits=sinks, **dict(options))
            kept.append(new)
            return out

        x = block(x, attend)
        return kept[0], x

    chunks = jax.lax.scan(step, cache, _split(x, chunk))[1]
    return jnp.moveaxis(chunks, 0, 1).reshape(x.shape)


@functools.partial(jax.jit, static_argnums=4)
def _compared(decoder: Decoder, x: jax.Array, windows: jax.Array, exact: jax.Array, chunk: int) -> dict[str, Any]:
    """Compares logits of the last layer's output x with exact log-probabilities."""

    def step(inputs: Any) -> tuple[dict[str, jax.Array], jax.Array]:
        x, targets, expected = inputs
        got = jax.nn.log_softmax(decoder.logits(decoder.norm(x)))
        each = {
            "nats": _nats(got, targets),
            "reference": _nats(expected, targets),
            "kl": jnp.sum(jnp.exp(expected) * (expected - got), axis=-1),
            "top1": got.argmax(-1) == expected.argmax(-1),
        }
        return {name: x.mean(axis=-1) for name, x in each.items()}, each["kl"]

    means, kl = jax.lax.map(step, [_split(part, chunk) for part in (x, windows[:, 1:], exact)])
    return {"kl_of_tokens": kl, **{name: x.mean(axis=0) for name, x in means.items()}}


def _split(x: jax.Array, chunk: int) -> jax.Array:
    """Splits (n, context, ...) into chunks (chunks, n, chunk, ...)."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _nats(log_probabilities: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


NOT_SHOWN = (
    *("/", "+centered", "+turned", "calibrated", "orthogonal"),
    *("affine", "v2_rotated", "rotor_chain", "float8", "q8_0", "mxfp4"),
)
"""Parts of names of strategies that are left out of the plot; the table has them."""


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots the divergence by stored bits, a line for each family of strategies."""
    kept = [row for row in rows if row["point"]["keep"] == rows[0]["point"]["keep"]]
    named = [
        {
            "point": {**row["point"], "family": family},
            "metrics": {**row["metrics"], "divergence": row["metrics"]["kl"], "stored_bits": row["metrics"]["bits"]},
        }
        for row in kept
        if (family := _family(row["point"]["strategy"]))
    ]
    if not named:
        return []
    path = folder / "kl.png"
    return [plots.curves(named, path, x="stored_bits", y="divergence", series="family", panel="model", log=True)]


def _family(name: str) -> str:
    """Returns a strategy's name without bits; "" if it is not shown, as `v3` of fractional bits: two codes in one."""
    if any(mark in name for mark in NOT_SHOWN) or (name.startswith("v3") and "." in name):
        return ""
    return name if name in FORMATS else re.sub(r"_[\d.]+", "", name)
