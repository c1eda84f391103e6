"""Whole steps on a GPU: appending, a layer's attention in a loop on the device, a decoder's tokens, and search.

The yardstick keeps keys and values in bfloat16 and attends by cuDNN. Codes are those of `gpu_attention`'s caches. A
profiler names the kernels of a step; XLA launches them one by one while it runs, also those of a command buffer.
"""

import collections
import dataclasses
import functools
import glob
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rqjax
from experiments.devices import gpu_clock
from experiments.devices.gpu_attention import SINKS, WINDOW, Shape, filled
from experiments.harness.timing import turns

SIZES = {
    "append": ("batch", "time"),
    "step": ("batch", "tokens", "groups"),
    "decoder": ("batch", "tokens"),
    "search": ("vectors", "queries"),
}
"""Names of the numbers in a case's last word, by its first word."""
ROOM = 512
"""Tokens for which a cache has room beyond those it holds."""
PROFILED = 4
"""Calls under the profiler."""
SHOWN = 8
"""Kernels that a row names."""
Plain = tuple[jax.Array, jax.Array, jax.Array]
"""Keys and values (batch, slots, heads, dim) in bfloat16, and the length of each sequence."""


def measure(values: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Measures a step; `vs_bfloat16` is how many times as fast as the yardstick it is, where there is one."""
    kinds = {"append": _append, "step": _step, "decoder": _decoder, "search": _search}
    return kinds[values["kind"]](values, point, gpu_clock.Settings.of(point))


def _append(values: dict[str, Any], point: dict[str, Any], clock: gpu_clock.Settings) -> dict[str, Any]:
    """Appends always at the same place, so that the work is always the same."""
    batch, time = values["batch"], values["time"]
    shape = Shape(batch, ROOM * -(-time // ROOM), 1, point["kv_heads"], point["dim"])

    def step(cache: rqjax.KVCache, k: jax.Array, v: jax.Array) -> rqjax.KVCache:
        return rqjax.append(_at(cache, shape.tokens), k, v)

    cache = filled(values["name"], shape._replace(tokens=2 * shape.tokens))
    k, v = _random(2, batch, time, shape.heads, shape.dim)
    return _donated(step, cache, (k, v), clock)


def _step(values: dict[str, Any], point: dict[str, Any], clock: gpu_clock.Settings) -> dict[str, Any]:
    """Appends a token and attends, some times in a loop on the device."""
    shape = Shape(values["batch"], values["tokens"], values["groups"], point["kv_heads"], point["dim"])
    found = {by: _looped(by, values["name"], shape, point["steps"], clock) for by in {values["by"], "cudnn"}}
    mine = found[values["by"]]
    return {**mine, "vs_bfloat16": found["cudnn"]["us"] / mine["us"]}


def _looped(by: str, name: str, shape: Shape, steps: int, clock: gpu_clock.Settings) -> dict[str, Any]:
    q = _random(steps, shape.batch, 1, shape.heads * shape.groups, shape.dim)
    k, v = _random(2, steps, shape.batch, 1, shape.heads, shape.dim)
    step, state = (_plain_step, _plain(shape)) if by == "cudnn" else (_coded_step, _coded(name, shape))

    def looped(carry: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def at(i: jax.Array, carry: Any) -> Any:
            state, total = carry
            out, state = step(state, q[i], k[i], v[i])
            return state, total + out

        state, total = carry
        return lax.fori_loop(0, steps, at, (_at(state, shape.tokens), total))

    return _donated(looped, (state, jnp.zeros_like(q[0])), (q, k, v), clock, steps)


def _coded_step(cache: rqjax.KVCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, rqjax.KVCache]:
    return rqjax.dot_product_attention(q, k, v, cache)


def _plain_step(state: Plain, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Plain]:
    keys, values, lengths = state
    keys, values = (lax.dynamic_update_slice_in_dim(x, new, lengths[0], 1) for x, new in ((keys, k), (values, v)))
    by = "cudnn" if jax.default_backend() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=lengths + 1, implementation=by)
    return out, (keys, values, lengths + 1)


def _plain(shape: Shape) -> Plain:
    keys, values = _random(2, shape.batch, shape.tokens + ROOM, shape.heads, shape.dim)
    return keys, values, jnp.full(shape.batch, shape.tokens, jnp.int32)


def _coded(name: str, shape: Shape) -> rqjax.KVCache:
    return _at(filled(name, shape._replace(tokens=shape.tokens + ROOM)), shape.tokens)


def _at(state: Any, tokens: int) -> Any:
    """Sets the length of each sequence back: to so many tokens, and those in full precision."""
    if isinstance(state, rqjax.KVCache):
        return dataclasses.replace(state, lengths=jnp.full_like(state.lengths, tokens + WINDOW + SINKS))
    return (*state[:2], jnp.full_like(state[2], tokens))


def _decoder(values: dict[str, Any], point: dict[str, Any], clock: gpu_clock.Settings) -> dict[str, Any]:
    """Makes tokens one by one, each way in turns. Decoders need flax, which no other case does."""
    from experiments.language import generation_throughput
    from rqjax.nn.sampling import GRAPHS

    decoder, steps = generation_throughput.decoder_of(point["model"], "bfloat16"), point["steps"]
    config, tokens, batch = decoder.config, values["tokens"], values["batch"]
    shape = Shape(batch, tokens, 1, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    options = GRAPHS if jax.default_backend() == "gpu" else None
    one = {
        by: jax.jit(step, donate_argnums=2, compiler_options=options)  # pyright: ignore[reportArgumentType]
        for by, step in (("rqjax", _coded_token), ("cudnn", _plain_token))
    }
    states = {
        "rqjax": tuple(_coded(values["name"], shape) for _ in layers),
        "cudnn": tuple(_plain(shape) for _ in layers),
    }
    token = {by: jnp.zeros((batch, 1), jnp.int32) for by in one}

    def make(by: str, count: int) -> jax.Array:
        states[by] = tuple(_at(state, tokens) for state in states[by])
        for _ in range(count):
            token[by], states[by] = one[by](decoder, token[by], states[by])
        return token[by]

    times = turns({by: functools.partial(make, by, steps) for by in one}, clock.rounds // 5 + 2)
    us = {by: float(np.median(taken[1:])) / steps * 1e6 for by, taken in times.items()}
    profile = _profiled(functools.partial(make, values["by"], 1))
    mine = us[values["by"]]
    return {"us": mine, "queued": True, "vs_bfloat16": us["cudnn"] / mine, **profile}


def _coded_token(decoder: Any, token: jax.Array, caches: Any) -> Any:
    logits, caches = decoder(token, caches)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches


def _plain_token(decoder: Any, token: jax.Array, states: Any) -> Any:
    kept, positions = list(states), states[0][2][:, None]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k = decoder.turned(layer, positions, q, k)
        out, kept[layer] = _plain_step(kept[layer], q, k, v)
        return out

    logits = decoder.logits(decoder.hidden(token, attend))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), tuple(kept)


def _search(values: dict[str, Any], point: dict[str, Any], clock: gpu_clock.Settings) -> dict[str, Any]:
    """Finds the ten nearest vectors of each query."""
    sizes = (values["vectors"], values["queries"])
    x, y = (jax.random.normal(jax.random.key(i), (n, point["dim"])) for i, n in enumerate(sizes))
    index = rqjax.Index.build(rqjax.METHODS[values["name"]](jax.random.key(2), point["dim"], 4), x)
    search = functools.partial(jax.jit(lambda index, y: index.search(y, 10)), index, y)
    time = gpu_clock.of_jax(clock).time([search] * min(6, clock.calls))
    return {"us": time.us, "queued": time.queued, **_profiled(search)}


def _donated(
    step: Callable[..., Any], state: Any, inputs: Sequence[jax.Array], clock: gpu_clock.Settings, steps: int = 1
) -> dict[str, Any]:
    """Measures one of the `steps` in a call that takes the state of the call before, in place."""
    run, kept = jax.jit(step, donate_argnums=0), [state]

    def call() -> Any:
        kept[0] = run(kept[0], *inputs)
        return kept[0]

    def silent() -> None:  # what the next call donates cannot be waited for
        call()

    time = gpu_clock.of_jax(clock).time([silent] * (min(6, clock.calls) - 1) + [call])
    return {"us": time.us / steps, "queued": time.queued, **_profiled(call, steps)}


def _profiled(run: Callable[[], Any], steps: int = 1) -> dict[str, Any]:
    """Returns the launches of a step, and its kernels with their microseconds, the longest first."""
    if jax.default_backend() != "gpu":
        return {}
    taken = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                jax.block_until_ready(run())
        (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines if "gpu" in plane.name.lower() else ():
                for event in line.events if line.name and "Stream" in line.name else ():
                    taken[event.name].append(event.duration_ns / 1e3)
    count = PROFILED * steps
    each = sorted(((sum(times) / count, name) for name, times in taken.items()), reverse=True)
    kernels = [f"{name.removesuffix('_mosaic_gpu_kernel')[:40]} {us:.1f}" for us, name in each[:SHOWN]]
    return {"launches": sum(map(len, taken.values())) / count, "kernels": ", ".join(kernels)}


def _random(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
