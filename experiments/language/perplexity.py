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

from experiments.caches.attention_error import keep
from experiments.data import text
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models import fitted, models
from rqjax import KVCache
from rqjax.nn import Decoder
from rqjax.quantizers.formats import FORMATS

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


@functools.partial(jax.jit, static_argnums=4)
def _scores(
    decoder: Decoder, caches: tuple[KVCache, ...], windows: jax.Array, exact: jax.Array, chunk: int
) -> dict[str, Any]:
    """Computes means over the tokens of each window, and the divergence of each token."""

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def step(caches: Any, inputs: Any) -> tuple[Any, Any]:
        tokens, targets, expected = inputs
        logits, caches = decoder(tokens, caches)
        got = jax.nn.log_softmax(logits)
        each = {
            "nats": _nats(got, targets),
            "reference": _nats(expected, targets),
            "kl": jnp.sum(jnp.exp(expected) * (expected - got), axis=-1),
            "top1": got.argmax(-1) == expected.argmax(-1),
        }
        return caches, ({name: x.mean(axis=-1) for name, x in each.items()}, each["kl"])

    _, (means, kl) = jax.lax.scan(step, caches, (split(windows[:, :-1]), split(windows[:, 1:]), split(exact)))
    return {"kl_of_tokens": kl, **{name: x.mean(axis=0) for name, x in means.items()}}


def _nats(log_probabilities: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]


EXACT = {"bfloat16": 16, "float32": 32}
"""Bits of keys or values that are not in codes."""


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots the divergence by stored bits: a line for each family, a panel for each model, a file for each `keep`.

    Keys alone and values alone in codes have panels of their own, with the bits of these. `bfloat16` is a level.
    """
    paths = []
    for kept in dict.fromkeys(row["point"]["keep"] for row in rows):
        shown = [_shown(row["point"], row["metrics"]) for row in rows if row["point"]["keep"] == kept]
        floors = {row["model"]: row["divergence"] for row in shown if row["family"] == "bfloat16"}
        lines = {"bfloat16": lambda _, rows, floors=floors: floors[rows[0]["model"]]} if floors else {}
        coded = [{"point": row, "metrics": {}} for row in shown if row["family"] != "bfloat16"]
        coded.sort(key=lambda row: ["", "keys alone", "values alone"].index(row["point"]["part"]))
        parts = [f"{name} {n}" for name, n in zip(("newest", "first"), keep(kept), strict=True) if n]
        exact = f"{' and '.join(parts)} tokens exact" if parts else "all tokens in codes"
        path, note = folder / (f"kl_{kept}.png" if paths else "kl.png"), f"{exact}; bars: deviation over windows"
        style = {"series": "family", "panel": "panel", "log": True, "front": True, "lines": lines, "note": note}
        paths.append(plots.curves(coded, path, x="bits", y="divergence", **style))
    return paths


def _shown(point: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns what the plot shows of a row: family, panel, divergence, and the bits of what is in codes."""
    base, plus, options = point["strategy"].partition("+")
    parts = base.split("/")
    codes = [part for part in parts if part not in EXACT]
    alone = [part for part in parts if part in EXACT] if len(parts) == 2 else []
    name = f"{codes[0]}{plus}{options}" if len(codes) == 1 else point["strategy"]
    family = name if name in FORMATS or len(codes) == 2 else re.sub(r"_[\d.]+", "", name)
    part = f"{'keys' if parts[1] in EXACT else 'values'} alone" if alone else ""
    return {
        "model": point["model"],
        "family": f"{family}, mixed" if family == "v3" and "." in name else family,
        "part": part,
        "panel": f"{point['model']}, {part}" if part else point["model"],
        "bits": 2 * metrics["bits"] - EXACT[alone[0]] if alone else metrics["bits"],
        "divergence": metrics["kl"],
        "divergence_sd": metrics.get("kl_sd"),
    }
