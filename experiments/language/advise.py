"""Bits for each layer's keys and values, against the same bits in all layers.

Both are fitted to the same text, take the same bytes, and are judged on the same windows of held-out text. These go
through caches a chunk at a time. Each draw is of other calibration text and rotations; deviations are over draws.
"""

import functools
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
from experiments.models import layered, models
from rqjax import Strategy
from rqjax.nn import Decoder
from rqjax.nn.advise import Sensitivities, divergence, named_at, rates, sensitivities

MADE_BY = (
    "experiments/models/layered.py",
    "experiments/models/models.py",
    "rqjax/recipes/strategies.py",
    "rqjax/nn/advise.py",
)
TABLES = (
    Table(
        "The same bits in all layers, keys and values, and bits as advised: stored bits a number, KL of the next-token"
        " distribution (nats) on held-out text, one over the other, and what was expected of the advised; ± over draws"
        " of calibration text; seconds to measure and fit, compilation included",
        rows=("family", "uniform_bits"),
        columns=(),
        values=("stored_bits", "kl_uniform", "kl_advised", "over_uniform", "kl_expected", "seconds_to_advise"),
        each=("model",),
    ),
)


def check(point: dict[str, Any]) -> None:
    if point["uniform_bits"] not in rates(point["family"]):
        raise ValueError(f"expected uniform_bits of {rates(point['family'])}, got {point['uniform_bits']}")
    keep(point["keep"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one budget: that of the family's strategy with these bits everywhere."""
    decoder, held_out, exact = _reference(point["model"], point["corpus"], point["context"], point["held_out"])
    window, sinks = keep(point["keep"])

    def lost(strategies: list[Strategy], key: jax.Array) -> float:
        """Averages the divergence over the held-out tokens."""
        caches = decoder.caches(strategies, key, len(held_out), point["context"], window=window, sinks=sinks)
        coded = layered.cached(decoder, held_out, caches, point["chunk"])
        return float(divergence(decoder, exact, coded).mean())

    def one(draw: int) -> dict[str, float]:
        given = (point[name] for name in ("model", "family", "corpus", "read", "keep", "windows", "draws"))
        windows, found, seconds = _measured(*given, draw)
        key, name = jax.random.key(draw), named_at(point["family"], *[point["uniform_bits"]] * 2)
        start = time.perf_counter()
        uniform = decoder.calibrate(windows, name, key)
        bits = float(np.mean([part.bits_per_vector / part.dim for one in uniform for part in (one.keys, one.values)]))
        advice = found.under(bits)
        advised = decoder.calibrate(windows, advice.names, key)
        seconds += time.perf_counter() - start
        most, least = lost(uniform, key), lost(advised, key)
        return {
            "stored_bits": advice.bits,
            "kl_uniform": most,
            "kl_advised": least,
            "over_uniform": least / most,
            "kl_expected": float(advice.kl.sum()),
            "seconds_to_advise": seconds,
        }

    draws = [one(draw) for draw in range(point["draws"])]
    return mean_and_deviation({name: np.array([draw[name] for draw in draws]) for name in draws[0]})


@functools.lru_cache(maxsize=1)
def _reference(name: str, corpus: str, context: int, count: int) -> tuple[Decoder, jax.Array, jax.Array]:
    """Returns a model, windows (n, context) of held-out text, the last layer's output for them without a cache."""
    decoder, tokenizer = models.load(name)
    windows = jnp.asarray(text.sample(corpus, "held_out", tokenizer, context, count)[:, :-1])
    return decoder, windows, layered.exact(decoder, windows)


@functools.lru_cache(maxsize=4)
def _measured(
    name: str, family: str, corpus: str, context: int, kept: str, count: int, draws: int, draw: int
) -> tuple[jax.Array, Sensitivities, float]:
    """Returns calibration text, the losses that were measured there, and the seconds it took."""
    if draw == 0:
        jax.clear_caches()  # of the model before, or there are more executables than Linux has mappings of memory
    decoder, tokenizer = models.load(name)
    windows = jnp.asarray(text.sample(corpus, "seen", tokenizer, context, count * draws)[draw::draws, :-1])
    start = time.perf_counter()
    window, sinks = keep(kept)
    found = sensitivities(decoder, windows, jax.random.key(draw), family=family, window=window, sinks=sinks)
    return windows, found, time.perf_counter() - start


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots the divergence by stored bits, of each family, uniform and advised."""
    shown = [
        {
            "point": {**row["point"], "who": f"{row['point']['family']}, {who}"},
            "metrics": {
                **row["metrics"],
                "divergence": row["metrics"][f"kl_{who}"],
                "divergence_sd": row["metrics"].get(f"kl_{who}_sd"),
            },
        }
        for row in rows
        for who in ("uniform", "advised")
    ]
    style: dict[str, Any] = {"series": "who", "panel": "model", "log": True, "note": "bars: deviation over draws"}
    return [plots.curves(shown, folder / "kl.png", x="stored_bits", y="divergence", **style)]
