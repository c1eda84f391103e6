"""Bits for each layer's keys and values, against the same bits in all layers.

Both are fitted to the same training text, take the same bytes, and are judged on the same windows of held-out text.
Each draw is of other training text and other rotations; deviations are over draws.
"""

import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import text
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models import models
from rqjax import Strategy
from rqjax.nn import Decoder
from rqjax.nn.advise import Sensitivities, divergence, named_at, rates, sensitivities

MADE_BY = ("experiments/models/models.py", "rqjax/recipes/strategies.py", "rqjax/nn/advise.py")
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
    if point["held_out"] % point["windows"]:
        raise ValueError(f"expected held_out to be a multiple of windows = {point['windows']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one budget: that of the family's strategy with these bits everywhere."""
    tokens = text.held_out(point["corpus"], models.load(point["model"]).tokenizer)
    held_out = jnp.asarray(text.windows(tokens, point["context"], point["held_out"])[:, :-1])

    def one(draw: int) -> dict[str, float]:
        decoder, windows, found, seconds = _measured(
            point["model"], point["family"], point["corpus"], point["context"], point["windows"], draw
        )
        name, start = named_at(point["family"], *[point["uniform_bits"]] * 2), time.perf_counter()
        uniform = decoder.calibrate(windows, name, jax.random.key(draw))
        bits = float(np.mean([part.bits_per_vector / part.dim for one in uniform for part in (one.keys, one.values)]))
        advice = found.under(bits)
        strategies = decoder.calibrate(windows, advice.names, jax.random.key(draw))
        seconds += time.perf_counter() - start
        lost, least = (_mean(decoder, held_out, some, len(windows)) for some in (uniform, strategies))
        return {
            "stored_bits": advice.bits,
            "kl_uniform": lost,
            "kl_advised": least,
            "over_uniform": least / lost,
            "kl_expected": float(advice.kl.sum()),
            "seconds_to_advise": seconds,
        }

    draws = [one(draw) for draw in range(point["draws"])]
    return mean_and_deviation({name: np.array([draw[name] for draw in draws]) for name in draws[0]})


@functools.lru_cache(maxsize=4)
def _measured(
    name: str, family: str, corpus: str, context: int, count: int, draw: int
) -> tuple[Decoder, jax.Array, Sensitivities, float]:
    """Returns the model, training text, the losses that were measured there, and the seconds it took."""
    if draw == 0:
        jax.clear_caches()  # of the model before, or there are more executables than Linux has mappings of memory
    decoder, tokenizer = models.load(name)
    tokens = text.seen(corpus, tokenizer)
    first = len(tokens) * draw // 8  # so that no two of eight draws have their windows in the same places
    windows = jnp.asarray(text.windows(np.roll(tokens, -first), context, count)[:, :-1])
    start = time.perf_counter()
    found = sensitivities(decoder, windows, jax.random.key(draw), family=family)
    return decoder, windows, found, time.perf_counter() - start


def _mean(decoder: Decoder, tokens: jax.Array, strategies: list[Strategy], at_a_time: int) -> float:
    """Averages the divergence; shapes are those of the calibration, so that nothing is compiled again."""
    parts = jnp.split(tokens, len(tokens) // at_a_time)
    return float(np.mean([divergence(decoder, part, strategies) for part in parts]))


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
