"""Caches of latent attention in codes: bytes, and speed as ratios in one run against plain latents in bfloat16.

A strategy takes turns with plain caches of the same tokens, which have no slot to spare. They are one array of the
coordinates that turn and the latent, or an array for each; the faster one counts. Bytes are of everything that a cache
of one layer and sequence holds. A time is the least over the rounds of the second of two calls, which other processes
disturb the least.

Codes that learn are fitted to vectors whose variance falls as 1 / n along random axes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.harness.table import Table
from experiments.harness.texts import numbers
from experiments.harness.timing import turns
from experiments.models import fitted
from rqjax.cache.kv import GROWTH
from rqjax.core import check_int
from rqjax.quantizers.combinators import Split
from rqjax.recipes.strategies import parsed, with_bits

MADE_BY = ("rqjax/recipes/strategies.py", "rqjax/cache/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "A cache of latents: bytes of it all against plain latents in bfloat16, attention of one token in milliseconds"
        " and how many times as fast; appending a token where no unit is complete",
        rows=("tokens", "strategy"),
        columns=(),
        values=("bits", "bytes", "smaller", "attend_ms", "vs_bfloat16", "append_ms"),
        each=("heads",),
    ),
)
FITTED_TO = 4096
"""Vectors that quantizers learn from."""


def check(point: dict[str, Any]) -> None:
    _shape(point)
    fitted.check(point["strategy"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one strategy at one shape, "<query heads>x<tokens>"."""
    heads, tokens = _shape(point)
    turning, latent = point["turning"], point["latent"]
    dim = turning + latent
    k = _vectors(1, tokens, turning, latent).astype(jnp.bfloat16)[None, :, None]
    q = jax.random.normal(jax.random.key(2), (1, 1, heads, dim), jnp.bfloat16)
    strategy = _strategy(point["strategy"], turning, latent)
    max_len = -(-(tokens + 2 * (point["rounds"] + 2)) // GROWTH) * GROWTH
    append, attend = jax.jit(rqjax.append, donate_argnums=0), jax.jit(rqjax.attend)
    cache, growing = (append(strategy.cache(1, 1, max_len), k) for _ in range(2))

    def appended() -> Any:
        nonlocal growing
        growing = append(growing, k[:, :1])
        return growing

    one, each = k[0, :, 0], (jnp.array(k[0, :, 0, :turning]), jnp.array(k[0, :, 0, turning:]))
    calls: dict[str, Callable[[], Any]] = {
        "append": appended,
        "attend": lambda: attend(cache, q),
        "one array": lambda: _attend_one(one, q, turning),
        "two arrays": lambda: _attend_each(*each, q),
    }
    times = {name: 1e3 * float(s[2:, 1].min()) for name, s in turns(calls, point["rounds"] + 2, calls=2).items()}
    jax.clear_caches()
    held = strategy.nbytes(1, 1, tokens)
    return {
        "heads": heads,
        "tokens": tokens,
        "bits": strategy.keys.bits_per_vector / dim,
        "bytes": held,
        "smaller": 2 * dim * tokens / held,
        "attend_ms": times["attend"],
        "append_ms": times["append"],
        "vs_bfloat16": min(times["one array"], times["two arrays"]) / times["attend"],
    }


def _vectors(seed: int, count: int, turning: int, latent: int) -> jax.Array:
    """Draws coordinates that turn, then latents."""
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(latent, latent)))[0]
    z = jax.random.normal(jax.random.key(seed), (count, turning + latent))
    spread = z[:, turning:] * jnp.arange(1, latent + 1) ** -0.5
    return jnp.concatenate([z[:, :turning], spread @ axes.astype(np.float32)], axis=1)


@functools.cache
def _strategy(name: str, turning: int, latent: int) -> rqjax.Strategy:
    key = jax.random.key(1)
    if not fitted.learns(name):
        return rqjax.strategy(name, key, turning + latent, latent=latent)
    names, form = parsed(name)
    parts = jnp.split(_vectors(0, FITTED_TO, turning, latent), [turning], axis=1)

    def made(name: str, x: jax.Array) -> rqjax.Quantizer:
        recipe, bits = with_bits(name)
        if recipe in rqjax.FITTED:
            return rqjax.FITTED[recipe](key, x, bits)
        return rqjax.METHODS[recipe](key, x.shape[1], bits)

    return rqjax.Strategy(Split((made(names[0], parts[0]), made(names[-1], parts[1]))), rqjax.LastPart(), form, name)


@jax.jit
def _attend_each(rotary: jax.Array, latents: jax.Array, q: jax.Array) -> jax.Array:
    y = q[0, 0]
    scores = jnp.einsum("hd,td->ht", y[:, : rotary.shape[1]], rotary, preferred_element_type=jnp.float32)
    scores += jnp.einsum("hd,td->ht", y[:, rotary.shape[1] :], latents, preferred_element_type=jnp.float32)
    return _weighted(scores / q.shape[3] ** 0.5, latents)


@functools.partial(jax.jit, static_argnums=2)
def _attend_one(keys: jax.Array, q: jax.Array, turning: int) -> jax.Array:
    scores = jnp.einsum("hd,td->ht", q[0, 0], keys, preferred_element_type=jnp.float32)
    return _weighted(scores / q.shape[3] ** 0.5, keys[:, turning:])


def _weighted(scores: jax.Array, latents: jax.Array) -> jax.Array:
    weights = jax.nn.softmax(scores, axis=-1).astype(latents.dtype)
    return jnp.einsum("ht,td->hd", weights, latents, preferred_element_type=jnp.float32)


def _shape(point: dict[str, Any]) -> tuple[int, int]:
    heads, tokens = numbers(point["shape"], "16x8192", "query heads and tokens")
    return check_int("query heads", heads, 1, 2**10), check_int("tokens", tokens, 2, 2**30)
