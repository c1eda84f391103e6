"""Attention from compressed caches to keys with a bias that turns with the position, as those of Qwen 2.5 do.

The bias is added before rotary positions, in the slower half of the planes that turn. Queries have so little there that
scores differ by as much for the bias as for what keys say; else a large bias would leave nothing but itself.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.caches import attention_error
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table

TABLES = (
    Table(
        "Divergence of the attention weights (KL, nats), and its ratio to that of the same keys without the bias; the"
        " norm of the bias, where that of what keys say is 11.3",
        rows=("norm", "strategy"),
        columns=("tokens",),
        values=("kl", "over_unbiased"),
    ),
)


def check(point: dict[str, Any]) -> None:
    rqjax.strategy(point["strategy"], jax.random.key(0), point["dim"])
    if not point["norm"] > 0:
        raise ValueError(f"expected a positive norm, got {point['norm']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """The newest `queries` tokens, on `heads` heads, for each of the seeds; everything in codes."""
    found = jnp.asarray([_divergences(point, seed) for seed in range(point["seeds"])])
    return mean_and_deviation({"kl": found[:, 0], "over_unbiased": found[:, 0] / found[:, 1]})


def _divergences(point: dict[str, Any], seed: int) -> list[jax.Array]:
    """Of keys with the bias and of those without."""
    rope, tokens, heads = rqjax.Rope(point["theta"]), point["tokens"], point["heads"]
    q, k, v, bias = _sample(jax.random.key(1000 + seed), rope, point)
    strategy = rqjax.strategy(point["strategy"], jax.random.key(seed), point["dim"])
    cache = strategy.cache(1, heads, tokens, rope=rope, window=0, sinks=0, dtype=jnp.float32)

    def divergence(k: jax.Array) -> jax.Array:
        if strategy.of_rope:
            return attention_error.errors(cache, q, k, v)["kl"]
        return attention_error.errors(cache, rope(q, positions[-q.shape[1] :]), rope(k, positions), v)["kl"]

    positions = jnp.arange(tokens)[:, None]
    return [divergence(k + bias), divergence(k)]


def _sample(key: jax.Array, rope: rqjax.Rope, point: dict[str, Any]) -> list[jax.Array]:
    """Queries of the newest tokens, keys and values before they turn, and the bias (heads, dim) of the keys.

    Scores have a deviation of 2 for the keys, and for the bias, whose planes are the slower half.
    """
    tokens, heads, dim, queries = (point[name] for name in ("tokens", "heads", "dim", "queries"))
    keys, slow = jax.random.split(key, 4), jnp.arange(dim) % (dim // 2) >= dim // 4
    k, v = (jax.random.normal(key, (1, tokens, heads, dim)) for key in keys[:2])
    q = jax.random.normal(keys[2], (1, queries, heads, dim))
    bias = jnp.where(slow, jax.random.normal(keys[3], (heads, dim)), 0)
    bias *= point["norm"] / jnp.linalg.norm(bias, axis=-1, keepdims=True)

    def scaled(q: jax.Array, k: jax.Array) -> jax.Array:
        """Queries whose scores have a deviation of 2."""
        positions = jnp.arange(tokens)[:, None]
        turned = rope(q, positions[-queries:]), rope(jnp.broadcast_to(k, (1, tokens, heads, dim)), positions)
        return q * 2 / (jnp.einsum("bthd,bshd->bhts", *turned) / dim**0.5).std()

    return [scaled(jnp.where(slow, 0, q), k) + scaled(jnp.where(slow, q, 0), bias), k, v, bias]


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    named = [{**row, "point": {**row["point"], "norm": f"bias of {row['point']['norm']}"}} for row in rows]
    return [plots.curves(named, folder / "kl.png", x="tokens", y="kl", series="strategy", panel="norm", log=True)]
