"""Tables of levels for trellis-coded quantization: generalized Lloyd on Gaussian numbers, and what rounding costs."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import special

from experiments.harness.table import Row, Table
from rqjax import codebooks, theory
from rqjax.codebooks import trellis_tables
from rqjax.quantizers.trellis import Trellis, improved

TABLES = (
    Table(
        "Mean squared error of Gaussian numbers, each vector's stream a ring",
        rows=("bits", "state_bits"),
        columns=(),
        values=("mse", "float32", "companded", "lloyd_max", "shannon"),
    ),
)


Bends = tuple[tuple[int, int], ...]
BENDS: Bends = ((0, 1), (86, 1), (112, 1), (116, 2), (121, 4), (124, 8))
FINE_BENDS: Bends = (
    (0, 110),
    (48, 20),
    (72, 29),
    (88, 41),
    (100, 58),
    (108, 79),
    (114, 130),
    (119, 209),
    (122, 306),
    (124, 706),
    (126, 2236),
)
STEP, FINE_STEP = 0.028, 0.00016
"""Where searching begins: about the quantiles of the Gaussian, in halves of int8 and in int16."""
KEPT = 4
"""Multipliers whose bends are searched."""
NUMBERS = ("multiplier", "bends", "offset", "fold")
"""What is stored of `Companded` besides its step."""


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Trains on new vectors at each step; the error is of vectors that no step has seen."""
    bits, state_bits = point["table"]
    levels = np.asarray(_train(bits, state_bits, point["dim"], point["n"], point["steps"]))
    stored, step = trellis_tables.rounded(levels) if bits <= 4 else (levels, 1.0)
    tables: dict[str, trellis_tables.Table | trellis_tables.Companded] = {
        "mse": trellis_tables.Table(jnp.asarray(stored), jnp.float32(step)),
        "float32": trellis_tables.Table(jnp.asarray(levels), jnp.float32(1)),
    }
    arrays: dict[str, Any] = {"levels": stored.tolist(), "step": step}
    if state_bits == 8:
        tables["companded"] = found = _search(bits, point["dim"], point["n"] // 2, point["hops"])
        arrays = {name: getattr(found, name) for name in NUMBERS} | {"step": float(found.step)}
    errors = {name: float(_error(Trellis(table, bits, point["dim"]), point["n"])) for name, table in tables.items()}
    bounds = {"lloyd_max": codebooks.distortion(bits), "shannon": theory.shannon_bound(bits)}
    return {"bits": bits, "state_bits": state_bits, **errors, **bounds, **arrays}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _train(bits: int, state_bits: int, dim: int, n: int, steps: int) -> jax.Array:
    """From the quantiles of the Gaussian in random order; far levels of fine codes are too rarely met to move there, so
    that those are from the quantiles of its cube root (Panter-Dite)."""
    start = special.ndtri((np.arange(2**state_bits) + 0.5) / 2**state_bits) * (3**0.5 if bits > 6 else 1)
    start = jax.random.permutation(jax.random.key(0), jnp.asarray(start, jnp.float32))

    def step(i: jax.Array, levels: jax.Array) -> jax.Array:
        x = jax.random.normal(jax.random.key(i), (n, dim))
        rate = jnp.where(i < 0.8 * steps, 1.7, 1.0)  # the end without what the longer steps stir up
        trellis = Trellis(trellis_tables.Table(levels, jnp.float32(1)), bits, dim)
        return improved(trellis, x, rate).values

    return lax.fori_loop(1, steps + 1, step, start)


@functools.partial(jax.jit, static_argnums=1)
def _error(trellis: Trellis, n: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(0), (4 * n, trellis.dim))
    return jnp.mean((x - trellis.decode(trellis.encode(x))) ** 2)


def _search(bits: int, dim: int, n: int, hops: int) -> trellis_tables.Companded:
    """Tries all odd multipliers, then moves the bends of the best few at random and keeps what is better."""
    whole, states = bits < trellis_tables.FINE, jnp.arange(256)
    x = jax.random.normal(jax.random.key(1), (n, dim))
    most = 255 if whole else 32_639  # so that two limbs in int8 hold them

    @jax.jit
    def fitted(levels: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The error, and the step that is best for the states that vectors take."""
        code = Trellis(trellis_tables.Table(levels.astype(jnp.float32), step), bits, dim)
        found = code.decode(code.encode(x))
        return jnp.mean((x - found) ** 2), step * (x * found).sum() / (found**2).sum()

    def scored(table: trellis_tables.Companded, rounds: int) -> tuple[float, trellis_tables.Companded]:
        """The least error, and the table with the step that has it."""
        if table.offset + sum(slope * (127 - place) for place, slope in table.bends) > most:
            return np.inf, table
        levels, step, found = table(states), table.step, []
        for _ in range(rounds):
            error, best = fitted(levels, step)
            found.append((float(error), dataclasses.replace(table, step=step)))
            step = best
        return min(found, key=operator.itemgetter(0))

    start = trellis_tables.Companded(jnp.float32(STEP), 1, BENDS)
    if not whole:
        start = trellis_tables.Companded(jnp.float32(FINE_STEP), 1, FINE_BENDS, FINE_BENDS[0][1] // 2, whole=False)
    mixings = itertools.product(range(1, 128, 2), (0, 4, 5, 6, 7))
    mixed = [dataclasses.replace(start, multiplier=multiplier, fold=fold) for multiplier, fold in mixings]
    best = sorted((scored(table, 4) for table in mixed), key=operator.itemgetter(0))[:KEPT]
    rng = np.random.default_rng(0)
    for hop in range(hops):
        i = hop % KEPT
        best[i] = min(best[i], scored(_moved(best[i][1], rng), 2), key=operator.itemgetter(0))
    return min(best, key=operator.itemgetter(0))[1]


def _moved(table: trellis_tables.Companded, rng: np.random.Generator) -> trellis_tables.Companded:
    """Some of its bends elsewhere and some steeper; slopes in int8 are powers of two, which are cheap."""
    places, slopes = (np.array(column) for column in zip(*table.bends, strict=True))
    places[1:] += rng.integers(-5, 6, len(places) - 1) * (rng.random(len(places) - 1) < 0.4)
    changes = rng.integers(-1, 2, len(places)) * (rng.random(len(places)) < 0.1)
    if not table.whole:
        changes = 0.1 * rng.standard_normal(len(places)) * (rng.random(len(places)) < 0.3)
    changes[0] = 0
    slopes = np.maximum(np.round(slopes * 2.0**changes), 1).astype(int)
    return dataclasses.replace(
        table,
        bends=tuple(zip(np.clip(places, 0, 126).tolist(), slopes.tolist(), strict=True)),
        offset=max(0, table.offset + int(rng.integers(-4, 5) * (rng.random() < 0.3))),
        step=table.step * jnp.float32(np.exp(0.03 * rng.standard_normal())),
    )


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """No plot: the file of the tables that are in the rows."""
    tables = {}
    for row in rows:
        bits, state_bits = row["point"]["table"]
        place = f"{bits}_{state_bits}"
        tables[f"step_{place}"] = np.float32(row["metrics"]["step"])
        for name, dtype in {"levels": np.int8, **dict.fromkeys(NUMBERS, int)}.items():
            if name in row["metrics"]:
                tables[f"{name}_{place}"] = np.array(row["metrics"][name], dtype)
    path = folder / trellis_tables.FILE.name
    np.savez(path, **tables)
    return [path]
