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
        values=("mse", "float32", "computed", "lloyd_max", "shannon"),
    ),
)


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
    errors = {name: float(_error(Trellis(table, bits, point["dim"]), point["n"])) for name, table in tables.items()}
    place = {"bits": bits, "state_bits": state_bits}
    bounds = {"lloyd_max": codebooks.distortion(bits), "shannon": theory.shannon_bound(bits)}
    return {**place, **errors, **bounds, "levels": stored.tolist(), "step": step}


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


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """No plot: the file of the tables that are in the rows."""
    tables = {}
    for row in rows:
        bits, state_bits = row["point"]["table"]
        place = f"{bits}_{state_bits}"
        tables[f"levels_{place}"] = np.array(row["metrics"]["levels"], np.int8 if bits <= 4 else np.float32)
        tables[f"step_{place}"] = np.float32(row["metrics"]["step"])
    path = folder / trellis_tables.FILE.name
    np.savez(path, **tables)
    return [path]
