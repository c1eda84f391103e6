"""Perplexity of language models whose keys and values go through a compressed cache.

Each window of held-out text is fed in chunks, whose tokens see each other in full precision, and what came before from
the cache. Nothing is scored that a decoder would not see. Deviations are over the windows, whose rotations differ too:
each seed draws those of its share of the windows.

Quantizers that learn are fitted to each layer on text that is not scored, for each seed anew. So is the mean of a
strategy with ":calibrated" behind it. It is training text of the models trained here, calibration text of others.
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
from experiments.harness import plot as plots, published
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models import fitted, layered, models
from rqjax import KVCache
from rqjax.core import check_int
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
        rows=("strategy", "bits", "fitted_on"),
        columns=(),
        values=("kl", "kl_median", "kl_999", "top1", "perplexity", "change", "published_change", "seconds_to_fit"),
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
    for name in ("seeds", "chunk", "windows"):
        check_int(name, point[name], 1, 2**20)
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
        result |= {f"kl_{kind or 'library'}": float(columns["kl"][sources == kind].mean()) for kind in text.KINDS}
    if point.get("published"):
        result["published_change"] = published.PERPLEXITY_CHANGE.get(point["strategy"])  # pyright: ignore[reportArgumentType]
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
        more = expected - got
        return {
            "nats": -got[target],
            "reference": -expected[target],
            "kl": jnp.sum(jnp.exp(expected) * (more + jnp.expm1(-more))),  # no term is negative: rounding adds up less
            "top1": (got.argmax() == expected.argmax()).astype(jnp.float32),
        }

    rows = (exact.reshape(-1, exact.shape[2]), coded.reshape(-1, coded.shape[2]), targets.reshape(-1))
    scores = jax.lax.map(one, rows, batch_size=TOKENS_AT_A_TIME)
    return jax.tree.map(lambda x: x.reshape(targets.shape), scores)


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots the divergence by stored bits: a line for each family, a panel for each model, a file for each `keep`.

    Keys alone and values alone in codes have panels of their own, with the bits of these. `bfloat16` is a level.
    Nothing is plotted of codes fitted to different texts, which have the same bits.
    """
    if len({row["point"].get("fitted_on") for row in rows}) > 1:
        return []
    exact_bits = {"bfloat16": 16, "float32": 32}

    def shown(point: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns what the plot shows of a row: family, panel, divergence, and the bits of what is in codes."""
        base, plus, options = point["strategy"].partition("+")
        parts = base.split("/")
        codes = [part for part in parts if part not in exact_bits]
        alone = [part for part in parts if part in exact_bits] if len(parts) == 2 else []
        name = f"{codes[0]}{plus}{options}" if len(codes) == 1 else point["strategy"]
        family = name if name in FORMATS or len(codes) == 2 else re.sub(r"_[\d.]+", "", name)
        part = f"{'keys' if parts[1] in exact_bits else 'values'} alone" if alone else ""
        return {
            "model": point["model"],
            "family": f"{family}, mixed" if family == "v3" and "." in name else family,
            "part": part,
            "panel": f"{point['model']}, {part}" if part else point["model"],
            "bits": 2 * metrics["bits"] - exact_bits[alone[0]] if alone else metrics["bits"],
            "divergence": metrics["kl"],
            "divergence_sd": metrics.get("kl_sd"),
        }

    paths = []
    for kept in dict.fromkeys(row["point"]["keep"] for row in rows):
        kept_rows = [shown(row["point"], row["metrics"]) for row in rows if row["point"]["keep"] == kept]
        floors = {row["model"]: row["divergence"] for row in kept_rows if row["family"] == "bfloat16"}
        lines = {"bfloat16": lambda _, rows, floors=floors: floors[rows[0]["model"]]} if floors else {}
        coded = [{"point": row, "metrics": {}} for row in kept_rows if row["family"] != "bfloat16"]
        coded.sort(key=lambda row: ["", "keys alone", "values alone"].index(row["point"]["part"]))
        parts = [f"{name} {n}" for name, n in zip(("newest", "first"), keep(kept), strict=True) if n]
        exact = f"{' and '.join(parts)} tokens exact" if parts else "a piece's own tokens exact"
        path, note = folder / (f"kl_{kept}.png" if paths else "kl.png"), f"{exact}; bars: deviation over windows"
        style = {"series": "family", "panel": "panel", "log": True, "front": True, "lines": lines, "note": note}
        paths.append(plots.curves(coded, path, x="bits", y="divergence", **style))
    return paths
