"""Attention of one token to a compressed cache on a GPU, against attention to bfloat16 keys and values.

A compressed cache has `tokens` tokens in codes and its window in full precision besides; bfloat16 has `tokens`. Codes
are those of `SAMPLE` random tokens, repeated, so that a cache of any size is there at once.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rqjax
from experiments.devices import gpu_clock, gpu_torch
from experiments.devices.gpu_clock import Settings, Time
from experiments.devices.gpu_codes import Missing, row
from rqjax.core import nbytes

SAMPLE = 256
WINDOW, SINKS = 112, 4
"""The ring of the newest tokens has 16 slots more than the window, 128, so that a repeated cache is a true one."""
PLAIN = ("cudnn", "torch")
"""Ways of attending to bfloat16: jax's and torch's."""


class Shape(NamedTuple):
    batch: int
    tokens: int
    groups: int
    """Query heads that share a head of keys and values."""
    heads: int
    """Heads of keys and values."""
    dim: int

    @property
    def bfloat16_bytes(self) -> int:
        return 4 * self.batch * self.tokens * self.heads * self.dim


def measure(values: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Measures attention to a `cache` of `batch` sequences of `tokens`, `groups` query heads a head of keys."""
    shape = Shape(values["batch"], values["tokens"], values["groups"], point["kv_heads"], point["dim"])
    clock = Settings.of(point)
    yardsticks = {way: _plain(way, shape, clock) for way in PLAIN}
    if values["by"] in PLAIN:
        time, size = yardsticks[values["by"]], shape.bfloat16_bytes
        if isinstance(time, str):
            raise Missing(time)
    else:
        attend = jax.jit(functools.partial(rqjax.attend, implementation=values["by"]))
        first = filled(values["cache"], shape)
        size = nbytes(first)
        calls, sets = gpu_clock.counts(clock, size, size)
        caches = [first, *(jax.tree.map(jnp.copy, first) for _ in range(sets - 1))]
        inputs = [(cache, _queries(i, shape)) for i, cache in enumerate(caches)]
        time = gpu_clock.of_jax(clock).time(gpu_clock.over(attend, inputs, calls))
    fastest = min((t.us for t in yardsticks.values() if not isinstance(t, str)), default=None)
    return {**row(time, size), "vs_bfloat16": fastest and fastest / time.us}


def filled(name: str, shape: Shape) -> rqjax.KVCache:
    """Makes a cache of a multiple of `SAMPLE` tokens in codes."""
    batch, tokens, _, heads, dim = shape
    strategy, rest = rqjax.strategy(name, jax.random.key(1), dim), WINDOW + SINKS
    empty = strategy.cache(1, heads, SAMPLE + rest, window=WINDOW, sinks=SINKS)
    k, v = jax.random.normal(jax.random.key(2), (2, 1, SAMPLE + rest, heads, dim), jnp.bfloat16)
    small = jax.jit(rqjax.append)(empty, k, v)
    large = jax.eval_shape(lambda: strategy.cache(batch, heads, tokens + rest, window=WINDOW, sinks=SINKS))

    def tiled(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.tile(x, [new // old if old else 1 for new, old in zip(like.shape, x.shape, strict=True)])

    parts = {
        field.name: jax.tree.map(tiled, getattr(small, field.name), getattr(large, field.name))
        for field in dataclasses.fields(small)
        if not field.metadata.get("static")
    }
    return dataclasses.replace(large, **parts | {"lengths": jnp.full(batch, tokens + rest, jnp.int32)})


@functools.cache
def _plain(way: str, shape: Shape, clock: Settings) -> Time | str:
    """Measures bfloat16 attention, or returns why it cannot."""
    calls, sets = gpu_clock.counts(clock, shape.bfloat16_bytes, shape.bfloat16_bytes)
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if 1.2 * sets * shape.bfloat16_bytes > limit:
        return f"needs {sets * shape.bfloat16_bytes / 2**30:.0f} GiB, there are {limit / 2**30:.0f}"
    try:
        if way == "torch":
            if not gpu_torch.available():
                return "there is no torch with a GPU"
            return gpu_torch.attention(shape, calls, sets, clock)
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        attend = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation=implementation))
        inputs = [(_queries(i, shape), *_keys_values(i, shape)) for i in range(sets)]
        return gpu_clock.of_jax(clock).time(gpu_clock.over(attend, inputs, calls))
    except (RuntimeError, ValueError) as error:
        return f"{way}: {error}"


@functools.partial(jax.jit, static_argnums=1)
def _queries(seed: int, shape: Shape) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (shape.batch, 1, shape.heads * shape.groups, shape.dim), "bfloat16")


@functools.partial(jax.jit, static_argnums=1)
def _keys_values(seed: int, shape: Shape) -> tuple[jax.Array, jax.Array]:
    sample = min(shape.tokens, 4096)
    k, v = jax.random.normal(jax.random.key(seed), (2, 1, sample, shape.heads, shape.dim), "bfloat16")
    times = (shape.batch, shape.tokens // sample, 1, 1)
    return jnp.tile(k, times), jnp.tile(v, times)
