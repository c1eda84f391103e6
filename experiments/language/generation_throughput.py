"""Tokens per second of whole decoders with a compressed cache, as ratios to a plain cache in one run.

The plain cache is that of `kv_throughput`. Each takes turns for `UNIT` tokens, in which the compressed one encodes
once; medians over the rounds. The caches hold random keys and values, and the next token is whatever comes.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rqjax
from experiments.caches.kv_throughput import plain_attend, write
from experiments.harness import plot as plots
from experiments.harness.table import Table
from experiments.harness.timing import turns
from experiments.models import models
from rqjax.cache.kv import GROWTH
from rqjax.core import platforms
from rqjax.nn import Decoder, DecoderConfig
from rqjax.scoring.tiles import UNIT

MADE_BY = ("experiments/caches/kv_throughput.py", "rqjax/nn/decoder.py", "rqjax/cache/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "Whole decoders: tokens per second, and how many times as fast as with a float32 cache",
        rows=("tokens", "strategy"),
        columns=(),
        values=("tokens_per_second", "vs_float32"),
        each=("model",),
    ),
)
WIDE = "{} layers of Llama 3.2 3B"
WIDE_FIELDS = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
"""Fields of a decoder with a vocabulary of bytes and random weights."""


def check(point: dict[str, Any]) -> None:
    rqjax.strategy(point["strategy"], jax.random.key(0), 64)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one strategy on one model, after `tokens` tokens."""
    decoder, tokens, baseline = decoder_of(point["model"], point["weights"]), point["tokens"], point["baseline"]
    max_len = -(-(tokens + UNIT * (point["rounds"] + 2)) // GROWTH) * GROWTH
    config = decoder.config
    shape = (1, tokens, config.num_key_value_heads, config.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
    full = [jnp.pad(jnp.swapaxes(x, 1, 2), [(0, 0), (0, 0), (0, max_len - tokens), (0, 0)]) for x in (k, v)]
    layers = range(config.num_hidden_layers)
    plain = [(*(jnp.array(x, baseline) for x in full), jnp.int32(tokens)) for _ in layers]
    mine = decoder.caches(point["strategy"], jax.random.key(0), 1, max_len)
    fill = jax.jit(rqjax.append, donate_argnums=0)
    states = {"mine": tuple(fill(cache, k, v) for cache in mine), "plain": plain}
    steps = {"mine": _compressed, "plain": _plain}
    seconds = _seconds(decoder, states, steps, point["rounds"])
    return {
        "tokens_per_second": 1 / seconds["mine"],
        f"vs_{baseline}": seconds["plain"] / seconds["mine"],
    }


@functools.lru_cache(maxsize=1)
@platforms.made_on_host
def decoder_of(name: str, dtype: str) -> Decoder:
    if layers := _layers(name):
        config = DecoderConfig.parse({**WIDE_FIELDS, "num_hidden_layers": layers})
        return jax.jit(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype(dtype)))()
    return models.load(name).decoder


def _layers(name: str) -> int:
    """Returns the layers of a decoder with random weights; 0 if the name is that of a trained one."""
    count = name.partition(" ")[0]
    return int(count) if count.isdigit() and name == WIDE.format(count) else 0


@functools.partial(jax.jit, donate_argnums=2)
def _compressed(decoder: Decoder, token: jax.Array, caches: Any) -> Any:
    logits, caches = decoder(token, caches)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), caches


@functools.partial(jax.jit, donate_argnums=2)
def _plain(decoder: Decoder, token: jax.Array, caches: Any) -> Any:
    kept, positions = list(caches), caches[0][2][None, None]

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # Written in a branch: else XLA copies the cache that it also reads, and the step takes ten times as long.
        q, k = decoder.turned(layer, positions, q, k)
        there = caches[layer][2] >= 0
        kept[layer] = jax.lax.cond(there, lambda cache: write(cache, k, v), lambda cache: cache, kept[layer])
        return plain_attend(kept[layer], q)

    logits = decoder.logits(decoder.hidden(token, attend))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), kept


def _seconds(decoder: Decoder, states: Any, steps: dict[str, Callable[..., Any]], rounds: int) -> dict[str, float]:
    """Measures the seconds of one token, each way."""
    token = {name: jnp.zeros((1, 1), jnp.int32) for name in states}

    def generate(name: str) -> jax.Array:
        for _ in range(UNIT):
            token[name], states[name] = steps[name](decoder, token[name], states[name])
        return token[name]

    times = turns({name: functools.partial(generate, name) for name in steps}, rounds + 1)
    return {name: float(np.median(taken[1:])) / UNIT for name, taken in times.items()}


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    path, lines = folder / "vs_float32.png", {"float32 cache": lambda *_: 1}
    return [plots.curves(rows, path, x="tokens", y="vs_float32", series="strategy", panel="model", lines=lines)]
