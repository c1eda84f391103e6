"""Speed of appending to a compressed cache and of attention from it, as ratios in one run against plain caches.

A strategy takes turns with float32 and bfloat16 caches of the same tokens: arrays with a slot for each token and none
to spare. They are attended to by two products and a softmax, with the keys of a head as (tokens, dim) and as (dim,
tokens), and by `jax.nn.dot_product_attention`. The fastest of the three counts. The strategy's own cache has room for
more tokens. A time is the least over the rounds of the second of two calls, which other processes disturb the least.
All arrays lie in several places in turn.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.data import samples
from experiments.harness import plot as plots
from experiments.harness.table import Table
from experiments.harness.texts import numbers
from experiments.harness.timing import turns
from experiments.models import fitted
from rqjax.cache.kv import GROWTH
from rqjax.core import check_int, extras

MADE_BY = ("rqjax/recipes/strategies.py", "rqjax/cache/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "Attention of one token, milliseconds, and how many times faster than a float32 and a bfloat16 cache",
        rows=("tokens", "strategy"),
        columns=(),
        values=("attend_ms", "vs_float32", "vs_bfloat16", "append_ms", "steps_per_second"),
        each=("groups",),
    ),
)
LAYOUTS = ("bhtd", "bhdt")
"""Layouts of the keys in a plain cache: b sequences, h heads, t tokens, d dimensions."""
ROPE = rqjax.Rope(5e5)
"""Rotary embedding of strategies that turn keys; a plain cache holds keys that have turned."""
FITTED_TO = 4096
"""Vectors that quantizers learn from."""
PLACES = 3
"""Places in memory that all arrays are copied to in turn: attention may take 1.7 times as long where they lie badly."""

_jax_attend = jax.jit(jax.nn.dot_product_attention)


def check(point: dict[str, Any]) -> None:
    _shape(point)
    check_int("rounds", point["rounds"], 2 * PLACES + 1, 2**20)  # or no 16 tokens are appended
    name = point["strategy"]
    fitted.check(name)
    if fitted.learns(name) and "/" in name:
        raise ValueError(f"expected one recipe that learns, for keys and values, got {name!r}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one strategy at one shape, "<query heads a KV head>x<tokens>"."""
    groups, tokens = _shape(point)
    heads, dim = point["kv_heads"], point["dim"]
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, (1, tokens, heads, dim), jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (1, 1, heads * groups, dim))
    rounds = -(-point["rounds"] // PLACES)
    token, max_len = k[:, :1], -(-(tokens + 2 * PLACES * (rounds + 2)) // GROWTH) * GROWTH
    strategy = _strategy(point["strategy"], heads, dim)
    append, attend = jax.jit(rqjax.append, donate_argnums=0), jax.jit(rqjax.attend)
    cache, growing = (append(strategy.cache(1, heads, max_len, rope=ROPE), k, v) for _ in range(2))
    plain, given = {}, {}
    for dtype in ("float32", "bfloat16"):
        for layout in LAYOUTS:
            both = jnp.einsum(f"bthd->{layout}", k.astype(dtype)), jnp.einsum("bthd->bhtd", v.astype(dtype))
            plain[f"{dtype} {layout}"] = (*both, None)
        given[f"{dtype} jax.nn"] = tuple(x.astype(dtype) for x in (q, k, v))

    def appended() -> Any:
        nonlocal growing
        growing = append(growing, token, token)
        return growing

    found = []
    for _ in range(PLACES):
        cache, growing, plain, given = jax.tree.map(jnp.copy, (cache, growing, plain, given))
        calls: dict[str, Callable[[], Any]] = {
            "append": appended,
            "attend": functools.partial(attend, cache, q),
            **{name: functools.partial(plain_attend, arrays, q, name.split()[1]) for name, arrays in plain.items()},
            **{name: functools.partial(_jax_attend, *arrays) for name, arrays in given.items()},
        }
        found.append(turns(calls, rounds + 2, calls=2))
    times = {name: 1e3 * np.concatenate([some[name][2:] for some in found]) for name in found[0]}
    ms = {name: float(x[:, 1].min()) for name, x in times.items()}
    mean_append = float(np.mean(times["append"].ravel()[: 2 * PLACES * rounds // 16 * 16]))  # one call in 16 encodes
    best = {dtype: min(ms[name] for name in ms if name.startswith(dtype)) for dtype in ("float32", "bfloat16")}
    jax.clear_caches()  # or a hundred rows have more executables than Linux has mappings of memory for a process
    return {
        "groups": groups,
        "tokens": tokens,
        "attend_ms": ms["attend"],
        "append_ms": mean_append,
        "steps_per_second": 1000 / (ms["attend"] + mean_append),
        "vs_float32": best["float32"] / ms["attend"],
        "vs_bfloat16": best["bfloat16"] / ms["attend"],
    }


@functools.partial(jax.jit, static_argnames="layout")
def plain_attend(
    cache: tuple[jax.Array, jax.Array, jax.Array | None], q: jax.Array, layout: str = LAYOUTS[0]
) -> jax.Array:
    """Attends to keys in `layout`, values (batch, heads, slots, dim), and so many taken slots, None for all."""
    k, v, length = cache
    y = q.reshape(q.shape[0], v.shape[1], -1, q.shape[3]).astype(k.dtype)
    rows = y.shape[2]
    if rows == 1 and k.dtype == jnp.bfloat16:  # XLA's product of a matrix and one vector takes seven times as long
        y = jnp.repeat(y, 4, axis=2)
    scores = jnp.einsum(f"bhrd,{layout}->bhrt", y, k, preferred_element_type=jnp.float32) / q.shape[3] ** 0.5
    if length is not None:
        scores = jnp.where(jnp.arange(v.shape[2]) < length, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("bhrt,bhtd->bhrd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return out[:, :, :rows].reshape(q.shape)


def write(cache: tuple[jax.Array, jax.Array, jax.Array], k: jax.Array, v: jax.Array) -> Any:
    put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(  # noqa: E731
        old, jnp.swapaxes(new, 1, 2).astype(old.dtype), cache[2], axis=2
    )
    return put(cache[0], k), put(cache[1], v), cache[2] + 1


@functools.cache
def _strategy(name: str, heads: int, dim: int) -> rqjax.Strategy:
    def keys() -> jax.Array:
        if "+pre_rope" in name:
            return _keys_before_they_turn(heads, dim)
        return samples.sample("kv", 1, FITTED_TO, dim)[0]

    return fitted.strategy(name, dim, keys)


def _keys_before_they_turn(heads: int, dim: int) -> jax.Array:
    """Returns keys of all layers of a trained model, (heads, n, dim): few of their principal axes have variance."""
    with extras.explained():
        from experiments.models import models

    name = models.BY_DIM[dim]
    arrays, ropes = models.calibration(name, "", FITTED_TO // 2, 2), models.load(name).decoder.config.ropes
    positions = jnp.arange(FITTED_TO)[:, None] % (FITTED_TO // 2)
    keys = [rope.inverse(arrays[f"layers.{layer}.k"], positions) for layer, rope in enumerate(ropes)]
    keys = jnp.swapaxes(jnp.concatenate(keys, axis=1), 0, 1)
    return jnp.resize(keys, (heads, *keys.shape[1:]))


def _shape(point: dict[str, Any]) -> tuple[int, int]:
    groups, tokens = numbers(point["shape"], "3x8192", "query heads a KV head and tokens")
    return check_int("query heads a KV head", groups, 1, 2**10), check_int("tokens", tokens, 2, 2**30)


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Plots speeds with three queries a key."""
    shown = [row for row in rows if row["metrics"]["groups"] == 3]
    if len({row["metrics"]["tokens"] for row in shown}) == 1:
        return []
    style: dict[str, Any] = {"x": "tokens", "series": "strategy"}
    return [
        plots.curves(shown, folder / f"{y}.png", y=y, lines={f"{y[3:]} cache": lambda *_: 1}, **style)
        for y in ("vs_float32", "vs_bfloat16")
    ]
