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
from jaxtyping import Array, Float
from scipy import special

from experiments.harness.table import Row, Table
from rqjax import codebooks, theory
from rqjax.codebooks import trellis_tables
from rqjax.codebooks.trellis_tables import Companded, Turns
from rqjax.quantizers.trellis_per_coordinate import TrellisPerCoordinate

MADE_BY = ("rqjax/codebooks/trellis_tables.py",)
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
"""Steps that the search begins with: about the quantiles of the Gaussian, in halves of int8 and in int16."""
KEPT = 4
"""Multipliers whose bends are searched."""
NUMBERS = ("multiplier", "bends", "offset", "fold")
"""Fields of `Companded` that are stored besides its step."""


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Trains on new vectors at each step; the error is of vectors that no step has seen."""
    bits, state_bits = point["table"]
    levels = [np.asarray(x) for x in _train(bits, state_bits, point["dim"], point["n"], point["steps"])]
    stored = [trellis_tables.rounded(x) if bits <= 4 else (x, 1.0) for x in levels]
    tables: dict[str, Sequence[Any]] = {
        "mse": [trellis_tables.Table(jnp.asarray(x), jnp.float32(step)) for x, step in stored],
        "float32": [trellis_tables.Table(jnp.asarray(x), jnp.float32(1)) for x in levels],
    }
    arrays = {"levels": [x.tolist() for x, _ in stored], "step": [step for _, step in stored]}
    if state_bits == 8:
        tables["companded"] = found = _search(bits, point["dim"], point["n"] // 2, point["hops"])
        arrays = {name: [getattr(table, name) for table in found] for name in NUMBERS}
        arrays["step"] = [float(table.step) for table in found]
    errors = {name: float(_error(_code(bits, point["dim"], of), point["n"])) for name, of in tables.items()}
    scalar = np.mean([codebooks.distortion(b) if b else 1 for b in trellis_tables.turns(bits)])
    bounds = {"lloyd_max": float(scalar), "shannon": theory.shannon_bound(bits)}
    return {"bits": bits, "state_bits": state_bits, **errors, **bounds, **arrays}


def _code(bits: float | int, dim: int, tables: Sequence[Any]) -> TrellisPerCoordinate:
    """Makes a code for coordinates of unit variance; a table for each number of bits in turns, the larger first."""
    table = tables[0] if len(tables) == 1 else Turns(tables[0], tables[1], float(bits))
    return TrellisPerCoordinate(jnp.zeros(dim), jnp.ones(dim), (table,), bits=(bits,) * dim)


def improved(code: TrellisPerCoordinate, x: Float[Array, "n d"], rate: float | Float[Array, ""] = 1.0) -> list[Array]:
    """Moves the levels of each part to the mean of the coordinates that take them, `rate` times the way (Lloyd).

    One coordinate more stands for the level as it was, so that no level is lost. A rate between 1 and 2 gets there in
    half the steps.
    """
    states, found = code.states(code.encode(x)), []
    for table, part in code.by_table:
        levels = table(jnp.arange(2**table.state_bits)) * table.step
        total = levels.at[states[:, part]].add(x[:, part])
        count = jnp.ones_like(levels).at[states[:, part]].add(1)
        found.append(levels + rate * (total / count - levels))
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _train(bits: float | int, state_bits: int, dim: int, n: int, steps: int) -> list[jax.Array]:
    """Trains levels from the quantiles of the Gaussian in random order. Far levels of fine codes are too rarely met to
    move there, so that fine codes begin with the quantiles of its cube root (Panter-Dite)."""
    start = special.ndtri((np.arange(2**state_bits) + 0.5) / 2**state_bits) * (3**0.5 if bits > 6 else 1)
    start = jax.random.permutation(jax.random.key(0), jnp.asarray(start, jnp.float32))

    def step(i: jax.Array, levels: list[jax.Array]) -> list[jax.Array]:
        x = jax.random.normal(jax.random.key(i), (n, dim))
        rate = jnp.where(i < 0.8 * steps, 1.7, 1.0)  # longer steps stir up the levels, so that the last ones are plain
        tables = [trellis_tables.Table(part, jnp.float32(1)) for part in levels]
        return improved(_code(bits, dim, tables), x, rate)

    return lax.fori_loop(1, steps + 1, step, [start] * len(set(trellis_tables.turns(bits))))


@functools.partial(jax.jit, static_argnums=1)
def _error(code: TrellisPerCoordinate, n: int) -> jax.Array:
    x = jax.random.normal(jax.random.key(0), (4 * n, code.dim))
    return jnp.mean((x - code.decode(code.encode(x))) ** 2)


Tables = tuple[Companded, ...]


def _search(bits: float | int, dim: int, n: int, hops: int) -> Tables:
    """Tries all odd multipliers, of each table in turn; then moves the bends of the best few at random and keeps what
    is better."""
    whole, states = bits < trellis_tables.FINE, jnp.arange(256)
    x = jax.random.normal(jax.random.key(1), (n, dim))
    most = 255 if whole else 32_639  # so that two limbs in int8 hold them

    @jax.jit
    def fitted(levels: list[jax.Array], steps: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the error, and the best steps for the states that vectors take."""
        pairs = zip(levels, steps, strict=True)
        code = _code(bits, dim, [trellis_tables.Table(part.astype(jnp.float32), step) for part, step in pairs])
        found = code.decode(code.encode(x))
        scales = [(x * found)[:, part].sum() / (found**2)[:, part].sum() for _, part in code.by_table]
        return jnp.mean((x - found) ** 2), [step * scale for step, scale in zip(steps, scales, strict=True)]

    def scored(tables: Tables, rounds: int) -> tuple[float, Tables]:
        """Returns the least error, and the tables with the steps that have it."""
        if max(t.offset + sum(slope * (127 - place) for place, slope in t.bends) for t in tables) > most:
            return np.inf, tables
        levels, steps, found = [table(states) for table in tables], [table.step for table in tables], []
        for _ in range(rounds):
            error, best = fitted(levels, steps)
            stepped = (dataclasses.replace(table, step=step) for table, step in zip(tables, steps, strict=True))
            found.append((float(error), tuple(stepped)))
            steps = best
        return min(found, key=operator.itemgetter(0))

    start = Companded(jnp.float32(STEP), 1, BENDS)
    if not whole:
        start = Companded(jnp.float32(FINE_STEP), 1, FINE_BENDS, FINE_BENDS[0][1] // 2, whole=False)
    count = len(set(trellis_tables.turns(bits)))
    best, mixings = [(np.inf, (start,) * count)], list(itertools.product(range(1, 128, 2), (0, 4, 5, 6, 7)))
    for which in (0, 1, 0, 1) if count == 2 else (0,):
        mixed = [_replaced(best[0][1], which, multiplier=m, fold=f) for m, f in mixings]
        best = sorted((scored(tables, 4) for tables in mixed), key=operator.itemgetter(0))[:KEPT]
    rng = np.random.default_rng(0)
    for hop in range(hops):
        i, which = hop % KEPT, hop // KEPT % count
        tables = list(best[i][1])
        tables[which] = _moved(tables[which], rng)
        best[i] = min(best[i], scored(tuple(tables), 2), key=operator.itemgetter(0))
    return min(best, key=operator.itemgetter(0))[1]


def _replaced(tables: Tables, which: int, **changes: int) -> Tables:
    return (*tables[:which], dataclasses.replace(tables[which], **changes), *tables[which + 1 :])


def _moved(table: Companded, rng: np.random.Generator) -> Companded:
    """Moves some bends of a table and makes some steeper; slopes in int8 are powers of two, which are cheap."""
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
    """Writes the file of the tables in the rows; there is no plot."""
    tables = {}
    for row in rows:
        bits, state_bits = row["point"]["table"]
        for name, dtype in {"step": np.float32, "levels": np.int8, **dict.fromkeys(NUMBERS, int)}.items():
            if name in row["metrics"]:
                found = np.array(row["metrics"][name], dtype)
                tables[f"{name}_{bits:g}_{state_bits}"] = found if len(found) > 1 else found[0]
    path = folder / trellis_tables.FILE.name
    np.savez(path, **tables)
    return [path]
