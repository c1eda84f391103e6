"""Perplexity of language models whose keys and values go through a compressed cache.

Each window of held-out text is fed in chunks, whose tokens see each other in full precision, and what came before from
the cache. Nothing is scored that a decoder would not see. Deviations are over the windows, whose rotations differ too:
each seed draws those of its share of the windows.

Quantizers that learn, and the mean of a strategy with ":calibrated" behind it, are fitted to each layer on text that is
not scored, for each seed anew: training text of the models trained here, calibration text of others.
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
from experiments.models import fitted, layered, models
from rqjax import KVCache
from rqjax.nn import Decoder
from rqjax.quantizers.formats import FORMATS

MADE_BY = (
    "experiments/models/layered.py",
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
        each=("model", "keep", "context"),
    ),
    Table(
        "The same, mean KL by kind of text",
        rows=("strategy", "bits", "fitted_on"),
        columns=(),
        values=tuple(f"kl_{kind or 'library'}" for kind in text.KINDS),
        each=("model", "keep", "context"),
        having="kl_prose",
    ),
)


CALIBRATION = 6144
"""Tokens that quantizers are fitted to, at least."""
TOKENS_AT_A_TIME = 256
"""Tokens whose logits are in memory at once."""


def check(point: dict[str, Any]) -> None:
    fitted.check(point["strategy"])
    keep(point["keep"])
    if point["context"] % point["chunk"]:
        raise ValueError(f"expected context to be a multiple of chunk = {point['chunk']}, got {point['context']}")
    unit = point["seeds"] * len(text.kinds(point["corpus"]))
    if point["windows"] % unit:
        raise ValueError(
            f"expected windows to be a multiple of {unit}, seeds times kinds of text, got {point['windows']}"
        )


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one strategy on one model: all windows together, and deviations over single windows."""
    decoder, windows, exact = _reference(point["model"], point["corpus"], point["context"], point["windows"])
    seeds, (window, sinks) = point["seeds"], keep(point["keep"])
    fitted_on = point.get("fitted_on", point["corpus"])
    tokens = functools.partial(training_text, point["model"], fitted_on, point["context"])
    seconds = 0.0

    def one(seed: int) -> tuple[dict[str, np.ndarray], float]:
        """Returns the scores of the tokens of a seed's windows, and the stored bits."""
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
    of_tokens = {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}  # (windows, seeds, tokens)
    of_tokens = {name: x.reshape(len(windows), -1) for name, x in of_tokens.items()}  # in the order of the windows
    kl, columns = of_tokens["kl"], {name: x.mean(axis=1) for name, x in of_tokens.items()}
    nats, reference = columns.pop("nats"), columns.pop("reference")

    def perplexities(nats: Any, reference: Any) -> dict[str, Any]:
        own, exact = np.exp(nats), np.exp(reference)
        return {"perplexity": own, "float_perplexity": exact, "change": 100 * (own / exact - 1)}

    result = mean_and_deviation(columns | perplexities(nats, reference))
    result |= {name: float(value) for name, value in perplexities(nats.mean(), reference.mean()).items()}
    result |= {"kl_median": float(np.median(kl)), "kl_999": float(np.quantile(kl, 0.999))}
    if len(text.kinds(point["corpus"])) > 1:
        sources = np.array(text.sources(point["corpus"], len(windows)))
        result |= {f"kl_{kind or 'library'}": float(columns["kl"][sources == kind].mean()) for kind in set(sources)}
    return {**result, "bits": round(bits[0], 3), "fitted_on": fitted_on, "seconds_to_fit": seconds or None}


@functools.lru_cache(maxsize=1)
def training_text(name: str, corpus: str, context: int) -> jax.Array:
    """Returns tokens (n, context), equally many of each kind of text, to fit quantizers to."""
    count = -(-CALIBRATION // context // len(text.kinds(corpus))) * len(text.kinds(corpus))
    return jnp.asarray(text.sample(corpus, "seen", models.load(name).tokenizer, context, count)[:, :-1])


@functools.lru_cache(maxsize=1)
def _reference(name: str, corpus: str, context: int, count: int) -> tuple[Decoder, jax.Array, jax.Array]:
    """Returns a model, windows (n, context + 1) of held-out text, the last layer's output for them without a cache."""
    decoder, tokenizer = models.load(name)
    windows = jnp.asarray(text.sample(corpus, "held_out", tokenizer, context, count))
    return decoder, windows, layered.exact(decoder, windows[:, :-1])


def _scores(
    decoder: Decoder, caches: tuple[KVCache, ...], windows: jax.Array, exact: jax.Array, chunk: int
) -> dict[str, np.ndarray]:
    """Computes of each token (n, time) the nats with the cache and without, the divergence, and whether the likeliest
    token is the same."""
    coded = layered.cached(decoder, windows[:, :-1], caches, chunk)
    return jax.tree.map(np.asarray, _compared(decoder, exact, coded, windows[:, 1:]))


@jax.jit
def _compared(decoder: Decoder, exact: jax.Array, coded: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    def one(inputs: Any) -> dict[str, jax.Array]:
        *outputs, target = inputs
        expected, got = (jax.nn.log_softmax(decoder.logits(x[None, None])[0, 0]) for x in outputs)
        return {
            "nats": -got[target],
            "reference": -expected[target],
            "kl": jnp.sum(jnp.exp(expected) * (expected - got)),
            "top1": (got.argmax() == expected.argmax()).astype(jnp.float32),
        }

    rows = (exact.reshape(-1, exact.shape[2]), coded.reshape(-1, coded.shape[2]), targets.reshape(-1))
    scores = jax.lax.map(one, rows, batch_size=TOKENS_AT_A_TIME)
    return jax.tree.map(lambda x: x.reshape(targets.shape), scores)


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
