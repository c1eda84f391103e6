"""Attention from compressed caches to keys with a bias that turns with the position, as those of Qwen 2.5 do.

The bias is added before rotary positions, in the slower half of the planes that turn. Queries are so small there that
scores vary as much by the bias as by the rest of the keys. Otherwise weights would depend on a large bias alone.
Channels may be loud, too. Learned quantizers are fitted to other keys of as many tokens, with the same bias and loud
channels.
"""

import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.caches import attention_error
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models import fitted
from rqjax.recipes.strategies import parsed, with_bits

MADE_BY = ("experiments/caches/attention_error.py", "rqjax/recipes/strategies.py", "rqjax/cache/key_forms.py")
TABLES = (
    Table(
        "Keys with a bias before rotary positions: stored bits a number, divergence of the attention weights (KL,"
        " nats), that of the same keys without the bias, and one over the other; the norm of the bias",
        rows=("tokens", "strategy"),
        columns=(),
        values=("bits", "kl", "kl_unbiased", "over_unbiased"),
        each=("norm",),
    ),
)
LEARNED_QUERIES = 1024
"""Queries of the newest tokens, for quantizers that learn from queries, too."""


def check(point: dict[str, Any]) -> None:
    name = point["strategy"]
    fitted.check(name)
    if fitted.learns(name) and parsed(name)[1].learned:
        raise ValueError(f"expected no mean of keys beside what learns, got {name!r}")
    if not point["norm"] > 0:
        raise ValueError(f"expected a positive norm, got {point['norm']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures the newest `queries` tokens, on `heads` heads, for each of the seeds; all keys are in codes."""
    rows = [_run(point, seed) for seed in range(point["seeds"])]
    jax.clear_caches()  # or many rows have more executables than Linux has mappings of memory for a process
    bits, kl, unbiased = (jnp.asarray(column) for column in zip(*rows, strict=True))
    found = mean_and_deviation({"kl": kl, "kl_unbiased": unbiased, "over_unbiased": kl / unbiased})
    return {"bits": round(float(bits[0]), 3), **found}


def _run(point: dict[str, Any], seed: int) -> tuple[float, jax.Array, jax.Array]:
    """Returns the bits, and the divergence of keys with the bias and of keys without."""
    rope, tokens, heads = rqjax.Rope(point["theta"]), point["tokens"], point["heads"]
    of_model, drawn, learned = jax.random.split(jax.random.key(1000 + seed), 3)
    q, k, v, bias = _sample(drawn, of_model, rope, point)
    positions = jnp.arange(tokens)[:, None]

    def divergence(bias: jax.Array | float) -> tuple[float, jax.Array]:
        strategy = _strategy(point, jax.random.key(seed), learned, of_model, bias)
        bits = strategy.keys.bits_per_vector / strategy.keys.dim
        cache = strategy.cache(1, heads, tokens, rope=rope, window=0, sinks=0, dtype=jnp.float32)
        if strategy.key_form.of_rope:
            return bits, attention_error.errors(cache, q, k + bias, v)["kl"]
        return bits, attention_error.errors(cache, rope(q, positions[-q.shape[1] :]), rope(k + bias, positions), v)[
            "kl"
        ]

    bits, biased = divergence(bias)
    return bits, biased, divergence(0.0)[1]


def _strategy(point: dict[str, Any], key: jax.Array, learned: jax.Array, of_model: jax.Array, bias: Any) -> Any:
    """Makes a strategy with exact values, since weights do not depend on them."""
    (name, *_), form = parsed(point["strategy"])
    (recipe, bits), dim = with_bits(name), point["dim"]
    if recipe in rqjax.FITTED:
        rope, make = rqjax.Rope(point["theta"]), rqjax.FITTED[recipe]
        count = min(point["tokens"], LEARNED_QUERIES)
        q, k, *_ = _sample(learned, of_model, rope, {**point, "queries": count})
        if isinstance(form, rqjax.AsGiven):
            positions = jnp.arange(point["tokens"])[:, None]
            q, k = rope(q, positions[-count:]), rope(k + bias, positions)
        else:
            k = k + bias
        moments = {"queries": jnp.einsum("bthd,bthe->hde", q, q, precision="highest") / count}
        taken = moments if "queries" in inspect.signature(make).parameters else {}
        keys = make(key, jnp.swapaxes(k[0], 0, 1), bits, **taken)
    else:
        keys = rqjax.strategy(name, key, dim).keys
    return rqjax.Strategy(keys, rqjax.Exact(dim, "float32"), form)


def _sample(key: jax.Array, of_model: jax.Array, rope: rqjax.Rope, point: dict[str, Any]) -> list[jax.Array]:
    """Draws queries of the newest tokens, keys and values before they turn, and the bias (heads, dim) of the keys.

    Scores have a deviation of 2 for the keys, and for the bias, whose planes are the slower half. The bias and the loud
    channels, which are `loud` times as loud as others, are the same for the same `of_model`.
    """
    tokens, heads, dim, queries = (point[name] for name in ("tokens", "heads", "dim", "queries"))
    keys, slow = jax.random.split(key, 3), jnp.arange(dim) % (dim // 2) >= dim // 4
    k, v = (jax.random.normal(key, (1, tokens, heads, dim)) for key in keys[:2])
    q = jax.random.normal(keys[2], (1, queries, heads, dim))
    of_bias, of_channels = jax.random.split(of_model)
    k *= attention_error.loudness(of_channels, heads, dim, point["loud"])
    bias = jnp.where(slow, jax.random.normal(of_bias, (heads, dim)), 0)
    bias *= point["norm"] / jnp.linalg.norm(bias, axis=-1, keepdims=True)

    def scaled(q: jax.Array, k: jax.Array) -> jax.Array:
        """Scales queries so that scores have a deviation of 2."""
        positions = jnp.arange(tokens)[:, None]
        turned = rope(q, positions[-queries:]), rope(jnp.broadcast_to(k, (1, tokens, heads, dim)), positions)
        return q * 2 / (jnp.einsum("bthd,bshd->bhts", *turned, precision="highest") / dim**0.5).std()

    return [scaled(jnp.where(slow, 0, q), k) + scaled(jnp.where(slow, q, 0), bias), k, v, bias]


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    if len({row["point"]["tokens"] for row in rows}) == 1:
        return []
    named = [{**row, "point": {**row["point"], "panel": f"bias of {row['point']['norm']}"}} for row in rows]
    style: dict[str, Any] = {"series": "strategy", "panel": "panel", "log": True, "note": "bars: deviation over draws"}
    return [plots.curves(named, folder / "kl.png", x="tokens", y="kl", **style)]
