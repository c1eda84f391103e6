"""Tables of levels for trellis-coded quantization: generalized Lloyd on Gaussian numbers, and what rounding costs."""

import functools
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
        values=("mse", "float32", "summed", "computed", "lloyd_max", "shannon"),
    ),
)


HIGH = (0, 0, 4)
PLACES = {1: (HIGH, (4, 3, 2)), 2: (HIGH, (2, 4, 2)), 3: (HIGH, (4, 3, 1)), 4: (HIGH, (4, 2, 1))}
"""By bits, where the states of a `Summed` table look up: the best of 160 second places, three short trainings each."""
STARTS = 8


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Trains on new vectors at each step; the error is of vectors that no step has seen."""
    bits, state_bits = point["table"]
    levels = np.asarray(_train(bits, state_bits, point["dim"], point["n"], point["steps"]))
    stored, step = trellis_tables.rounded(levels) if bits <= 4 else (levels, 1.0)
    tables = {
        "mse": trellis_tables.Table(jnp.asarray(stored), jnp.float32(step)),
        "float32": trellis_tables.Table(jnp.asarray(levels), jnp.float32(1)),
        "computed": trellis_tables.Computed.gaussian(state_bits),
    }
    if state_bits == 8 and bits in PLACES:
        tables["summed"] = _train_summed(bits, point["dim"], point["n"] // 8, point["hops"])
    errors = {name: float(_error(Trellis(table, bits, point["dim"]), point["n"])) for name, table in tables.items()}
    place = {"bits": bits, "state_bits": state_bits}
    bounds = {"lloyd_max": codebooks.distortion(bits), "shannon": theory.shannon_bound(bits)}
    if "summed" not in tables:
        return {**place, **errors, **bounds, "levels": stored.tolist(), "step": step}
    levels, step = tables["summed"].tables.tolist(), float(tables["summed"].step)
    return {**place, **errors, **bounds, "levels": levels, "step": step, "places": PLACES[bits]}


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


def _train_summed(bits: int, dim: int, n: int, hops: int) -> trellis_tables.Summed:
    """Least squares for the numbers of the tables, given the states that vectors take, from random starts; then hops:
    short trainings from the best so far and some noise, kept if they are better."""
    states, sums = jnp.arange(256), trellis_tables.Summed(jnp.zeros((2, 16), jnp.int8), jnp.float32(1), PLACES[bits])
    unit = jnp.eye(16)[:, :8] - jnp.eye(16)[:, :7:-1]
    features = jnp.concatenate([unit[sums.place(states, i)] for i in range(2)], axis=1)

    def trellis(numbers: jax.Array) -> Trellis:
        return Trellis(trellis_tables.Table(features @ numbers, jnp.float32(1)), bits, dim)

    @jax.jit
    def train(numbers: jax.Array, seed: jax.Array, steps: jax.Array) -> jax.Array:
        def step(i: jax.Array, numbers: jax.Array) -> jax.Array:
            x = jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), (n, dim))
            code = trellis(numbers)
            taken = code.states(code.encode(x))
            total, count = jnp.zeros(256).at[taken].add(x), jnp.full(256, 0.5).at[taken].add(1)
            gram = features.T @ (count[:, None] * features) + 1e-3 * jnp.eye(16)
            best = jnp.linalg.solve(gram, features.T @ (total + 0.5 * code.values) + 1e-3 * numbers)
            return numbers + jnp.where(i < 0.7 * steps, 1.5, 1.0) * (best - numbers)

        return lax.fori_loop(0, steps, step, numbers)

    error = jax.jit(lambda numbers: _error(trellis(numbers), n))
    rng = np.random.default_rng(0)
    starts = [train(jnp.asarray(rng.standard_normal(16), jnp.float32), seed, 40) for seed in range(STARTS)]
    found = min(starts, key=error)
    least = error(found)
    for hop in range(hops):
        noise = rng.standard_normal(16) * rng.choice([0.3, 0.15, 0.07, 0.03])
        noise = noise * (rng.random(16) < rng.choice([0.2, 1.0]))
        other = train(found + jnp.asarray(noise, jnp.float32), STARTS + hop, 6)
        if error(other) < least:
            found, least = other, error(other)
    numbers = np.asarray(train(found, STARTS + hops, 60))
    step = np.abs(np.asarray(features @ numbers)).max() / 127
    tables = np.round(np.concatenate([numbers.reshape(2, 8), -numbers.reshape(2, 8)[:, ::-1]], axis=1) / step)
    return trellis_tables.Summed(jnp.asarray(tables, jnp.int8), jnp.float32(step), PLACES[bits])


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """No plot: the file of the tables that are in the rows."""
    tables = {}
    for row in rows:
        bits, state_bits = row["point"]["table"]
        place = f"{bits}_{state_bits}"
        tables[f"levels_{place}"] = np.array(row["metrics"]["levels"], np.int8 if bits <= 4 else np.float32)
        tables[f"step_{place}"] = np.float32(row["metrics"]["step"])
        if "places" in row["metrics"]:
            tables[f"places_{place}"] = np.array(row["metrics"]["places"])
    path = folder / trellis_tables.FILE.name
    np.savez(path, **tables)
    return [path]
