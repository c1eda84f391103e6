"""Speed of appending to a compressed cache and of attention from it, as ratios in one run against plain caches.

A strategy takes turns with a float32 and a bfloat16 cache of the same tokens: contiguous (batch, heads, tokens, dim)
arrays, written in place, attended to by two products and a softmax over all tokens, masked beyond the length. Medians
over the rounds of the second of two calls.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments import plot as plots, published
from experiments.table import Table
from experiments.timing import turns
from rqjax.cache import GROWTH

TABLES = (
    Table(
        "Attention of one token, milliseconds, and how many times faster than a float32 and a bfloat16 cache",
        rows=("tokens", "strategy"),
        columns=(),
        values=("attend_ms", "vs_float32", "vs_bfloat16", "published_vs_float16", "append_ms", "steps_per_second"),
        each=("groups",),
    ),
)


def check(point: dict[str, Any]) -> None:
    _shape(point)
    rqjax.strategy(point["strategy"], jax.random.key(0), 8)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """One strategy at one shape, "<query heads a KV head>x<tokens>"."""
    groups, tokens = _shape(point)
    heads, dim = point["kv_heads"], point["dim"]
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, (1, tokens - 1, heads, dim), jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (1, 1, heads * groups, dim))
    max_len = -(-(tokens + 4 * point["rounds"] + 20) // GROWTH) * GROWTH
    strategy = rqjax.strategy(point["strategy"], jax.random.key(1), dim)
    caches: dict[str, Any] = {"mine": rqjax.append(strategy.cache(1, heads, max_len), k, v)}
    for dtype in ("float32", "bfloat16"):
        shape = [(0, 0), (0, 0), (0, max_len - tokens + 1), (0, 0)]
        full = [jnp.pad(jnp.swapaxes(x, 1, 2).astype(dtype), shape) for x in (k, v)]
        caches[dtype] = (*full, jnp.int32(tokens - 1))
    append = {"mine": jax.jit(rqjax.append, donate_argnums=0), "float32": plain_append, "bfloat16": plain_append}
    attend = {"mine": jax.jit(rqjax.attend), "float32": plain_attend, "bfloat16": plain_attend}
    token = k[:, :1]

    def appended(name: str) -> Any:
        caches[name] = append[name](caches[name], token, token)
        return caches[name]

    calls: dict[str, Callable[[], Any]] = {}
    for name in caches:
        calls[f"append {name}"] = lambda name=name: appended(name)
        calls[f"attend {name}"] = lambda name=name: attend[name](caches[name], q)
    ms, mean_append = _times(calls, point["rounds"])
    mine = published.TOKENS_PER_SECOND.get(point["strategy"], {}).get(tokens)
    return {
        "groups": groups,
        "tokens": tokens,
        "attend_ms": ms["attend mine"],
        "append_ms": mean_append,
        "steps_per_second": 1000 / (ms["attend mine"] + mean_append),
        "vs_float32": ms["attend float32"] / ms["attend mine"],
        "vs_bfloat16": ms["attend bfloat16"] / ms["attend mine"],
        "published_vs_float16": mine / published.TOKENS_PER_SECOND["float16"][tokens] if mine and groups == 3 else None,
    }


@jax.jit
def plain_attend(cache: tuple[jax.Array, jax.Array, jax.Array], q: jax.Array) -> jax.Array:
    k, v, length = cache
    y = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]).astype(k.dtype)
    scores = jnp.einsum("bhrd,bhtd->bhrt", y, k, preferred_element_type=jnp.float32) / q.shape[3] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[2]) < length, scores, -jnp.inf), axis=-1)
    out = jnp.einsum("bhrt,bhtd->bhrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out.reshape(q.shape)


def write(cache: tuple[jax.Array, jax.Array, jax.Array], k: jax.Array, v: jax.Array) -> Any:
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
        old, jnp.swapaxes(new, 1, 2).astype(old.dtype), cache[2], axis=2
    )
    return put(cache[0], k), put(cache[1], v), cache[2] + 1


plain_append = jax.jit(write, donate_argnums=0)


def _times(calls: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], float]:
    """Median milliseconds of each call; and the mean of mine of appending, one call in 16 of which makes codes."""
    times = {name: 1e3 * seconds[2:] for name, seconds in turns(calls, rounds + 2, calls=2).items()}
    medians = {name: float(np.median(ms[:, 1])) for name, ms in times.items()}
    return medians, float(np.mean(times["append mine"].ravel()[: 2 * rounds // 16 * 16]))


def _shape(point: dict[str, Any]) -> tuple[int, int]:
    groups, _, tokens = point["shape"].partition("x")
    if not (groups.isdigit() and tokens.isdigit() and int(groups) and int(tokens) > 1):
        raise ValueError(f"expected a shape like '3x8192', query heads a KV head and tokens, got {point['shape']!r}")
    return int(groups), int(tokens)


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    merged = [row for row in rows if row["metrics"]["groups"] == 3]
    path = folder / "vs_float32.png"
    return [plots.curves(merged, path, x="tokens", y="vs_float32", series="strategy", levels={"float32 cache": 1})]
