"""Attention from a compressed cache against attention from exact keys and values, on synthetic queries and keys."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.harness.texts import numbers
from rqjax.core import unknown_name

TINY = float(jnp.finfo(jnp.float32).tiny)
"""The least weight, for tokens that get none; smaller numbers are 0 to XLA."""
DATA = ("gaussian", "outlier_channels", "key_bias", "outlier_channels_and_key_bias")

MADE_BY = ("rqjax/recipes/strategies.py", "rqjax/recipes/methods.py", "rqjax/cache/*.py")
TABLES = (
    Table(
        "Divergence of the attention weights (KL, nats), shares of queries whose first token stays first, and among the"
        " first five; cosine of the output",
        rows=("keep", "strategy"),
        columns=("centered",),
        values=("kl", "top1", "top5", "cosine"),
        each=("data",),
    ),
)


def check(point: dict[str, Any]) -> None:
    if point["data"] not in DATA:
        raise unknown_name("data set", point["data"], DATA)
    rqjax.strategy(point["strategy"], jax.random.key(0), 8)
    keep(point["keep"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures the newest `queries` tokens of `context`, on `heads` heads, for each of the seeds."""
    rows = [_run(point, seed) for seed in range(point["seeds"])]
    columns = {name: jnp.asarray([row[name] for row in rows]) for name in rows[0]}
    return mean_and_deviation(columns)


def _run(point: dict[str, Any], seed: int) -> dict[str, Any]:
    q, k, v = _sample(point, jax.random.key(1000 + seed))
    name = point["strategy"] + ("+centered" if point["centered"] == "centered" else "")
    strategy = rqjax.strategy(name, jax.random.key(seed), point["dim"])
    window, sinks = keep(point["keep"])
    options = {"window": window, "sinks": sinks, "dtype": jnp.float32}
    return errors(strategy.cache(1, point["heads"], point["context"], **options), q, k, v)


@functools.partial(jax.jit, static_argnames="sliding_window")
def errors(
    cache: rqjax.KVCache, q: jax.Array, k: jax.Array, v: jax.Array, sliding_window: int | None = None
) -> dict[str, jax.Array]:
    """Compares attention from the cache with exact attention, for the newest tokens' queries.

    Queries and keys are as the cache takes them: before they turn, if it has a rope.
    """
    time, count, dim = k.shape[1], q.shape[1], q.shape[3]
    age = time - count + jnp.arange(count)[:, None] - jnp.arange(time)
    seen = (age >= 0) & (age < (sliding_window or time))
    turned = [q, k]
    if cache.key_form.rope is not None:
        turned = [cache.key_form.rope(x, jnp.arange(time - x.shape[1], time)[:, None]) for x in turned]
    turned[1], v_of_heads = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (turned[1], v))
    scores = jnp.einsum("bthd,bshd->bhts", *turned, precision="highest") / dim**0.5
    exact = jax.nn.log_softmax(jnp.where(seen, scores, -jnp.inf))
    coded = jnp.log(jnp.maximum(weights(cache, q, k, sliding_window), TINY))
    kl = jnp.where(seen, jnp.exp(exact) * (exact - coded), 0).sum(-1)
    top, first = (jax.lax.top_k(s, 5)[1] for s in (exact, coded))
    out = jnp.einsum("bhts,bshd->bthd", jnp.exp(exact), v_of_heads, precision="highest")
    return {
        "kl": kl.mean(),
        "top1": (top[..., 0] == first[..., 0]).mean(),
        "top5": (top[..., :1] == first).any(-1).mean(),
        "cosine": rqjax.metrics.cosine(out, rqjax.attend(rqjax.append(cache, k, v), q, sliding_window=sliding_window)),
    }


def weights(cache: rqjax.KVCache, q: jax.Array, k: jax.Array, sliding_window: int | None) -> jax.Array:
    """Returns the weights (batch, heads, queries, tokens) of `rqjax.attend` to keys appended to an empty cache.

    They are read from its outputs. The values of as many tokens as a head has dimensions are its axes, in full
    precision, and the values of all other tokens are 0.
    """
    batch, time, heads, dim = k.shape
    full = rqjax.Exact(dim, "float32")
    options = {"window": cache.window, "sinks": cache.sinks, "dtype": jnp.float32}
    empty = rqjax.KVCache.init(batch, heads, time, cache.key_quantizer, full, **options)  # tiles of the same size
    cache = rqjax.append(dataclasses.replace(cache, values=empty.values, own_value_quantizer=full), k, k)

    def some(first: jax.Array) -> jax.Array:
        axes = jnp.arange(time)[:, None, None] - first == jnp.arange(dim)
        values = jnp.broadcast_to(axes, k.shape).astype(k.dtype)
        held = rqjax.append(empty, values, values)
        with_values = dataclasses.replace(cache, values=held.values, exact_values=held.exact_values)
        return rqjax.attend(with_values, q, sliding_window=sliding_window)

    parts = jax.lax.map(some, jnp.arange(0, time, dim))
    return jnp.moveaxis(parts, 0, 3).transpose(0, 2, 1, 3, 4).reshape(batch, q.shape[2], q.shape[1], -1)[..., :time]


def _sample(point: dict[str, Any], key: jax.Array) -> list[jax.Array]:
    """Draws queries with scores of deviation 2, and keys with four channels times ten or ten deviations off center."""
    keys, (heads, dim) = jax.random.split(key, 5), (point["heads"], point["dim"])
    q = jax.random.normal(keys[0], (1, point["queries"], heads, dim))
    k, v = (jax.random.normal(key, (1, point["context"], heads, dim)) for key in keys[1:3])
    if point["data"].startswith("outlier_channels"):
        k *= loudness(keys[3], heads, dim, 10)
    q *= 2 / (jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / dim**0.5).std()
    if point["data"].endswith("key_bias"):
        k += 10 * jax.random.normal(keys[4], (heads, dim))
    return [q, k, v]


def loudness(key: jax.Array, heads: int, dim: int, loud: float | int) -> jax.Array:
    """Returns factors of channels (heads, dim): `loud` for four channels of each head, 1 for the others."""
    chosen = jax.vmap(lambda key: jax.random.choice(key, dim, (4,), replace=False))(jax.random.split(key, heads))
    return jax.vmap(lambda channels: jnp.ones(dim).at[channels].set(loud))(chosen)


def keep(text: str) -> tuple[int, int]:
    """Parses the numbers of newest and first tokens in full precision: '128+4'."""
    window, sinks = numbers(text, "128+4", "newest and first tokens")
    return window, sinks


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots the divergence of all strategies with as many exact tokens as the first row has."""
    named = [
        {**row, "point": {**row["point"], "panel": f"{row['point']['data']}, {row['point']['centered']}"}}
        for row in rows
        if row["point"]["keep"] == rows[0]["point"]["keep"]
    ]
    style: dict[str, Any] = {"series": "strategy", "panel": "panel", "note": "bars: deviation over draws"}
    return [plots.dots(named, folder / "kl.png", x="kl", **style)]
