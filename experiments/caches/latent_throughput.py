"""Caches of latent attention in codes: bytes, and speed as ratios in one run against plain latents in bfloat16.

A strategy takes turns with plain caches of the same tokens, which have no slot to spare: one array of what turns and
the latent, or an array for each; the faster one counts. Bytes are of everything that a cache of one layer and sequence
holds. The least over the rounds of the second of two calls, which other processes disturb the least.

Codes that learn are fitted to vectors whose variance falls as 1 / n along random axes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.caches import fitted
from experiments.harness.table import Table
from experiments.harness.texts import numbers
from experiments.harness.timing import turns
from rqjax.cache.kv import GROWTH
from rqjax.cache.strategies import parsed, with_bits
from rqjax.core import check_int
from rqjax.quantizers.combinators import Split

TABLES = (
    Table(
        "A cache of latents: bytes of it all against plain latents in bfloat16, attention of one token in milliseconds"
        " and how many times as fast",
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
    """One strategy at one shape, "<query heads>x<tokens>"."""
    heads, tokens = _shape(point)
    turning, latent = point["turning"], point["latent"]
    dim = turning + latent
    axes = np.linalg.qr(np.random.default_rng(0).normal(size=(latent, latent)))[0] * np.arange(1, latent + 1) ** -0.5

    def vectors(seed: int, count: int) -> jax.Array:
        z = jax.random.normal(jax.random.key(seed), (count, dim))
        return jnp.concatenate([z[:, :turning], z[:, turning:] @ axes.T.astype(np.float32)], axis=1)

    k = vectors(1, tokens).astype(jnp.bfloat16)[None, :, None]
    q = jax.random.normal(jax.random.key(2), (1, 1, heads, dim), jnp.bfloat16)
    strategy = _strategy(point["strategy"], vectors(0, FITTED_TO), latent)
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


def _strategy(name: str, x: jax.Array, latent: int) -> rqjax.Strategy:
    key, turning = jax.random.key(1), x.shape[1] - latent
    if not fitted.learns(name):
        return rqjax.strategy(name, key, x.shape[1], latent=latent)
    names, options = parsed(name)

    def made(name: str, x: jax.Array) -> rqjax.Quantizer:
        recipe, bits = with_bits(name)
        return (rqjax.FITTED[recipe] if recipe in rqjax.FITTED else _oblivious(recipe))(key, x, bits)

    return rqjax.Strategy(Split((made(names[0], x[:, :turning]), made(names[-1], x[:, turning:]))), None, **options)


def _oblivious(recipe: str) -> Callable[..., rqjax.Quantizer]:
    return lambda key, x, bits: rqjax.METHODS[recipe](key, x.shape[1], bits)


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
