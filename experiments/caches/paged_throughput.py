"""Speed of a cache in pages, which lie in random order, against the same cache without pages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.harness.table import Table
from experiments.harness.timing import turns
from experiments.models import fitted
from rqjax.cache.kv import GROWTH
from rqjax.core import PAGE

MADE_BY = ("rqjax/recipes/strategies.py", "rqjax/paging/*.py", "rqjax/cache/*.py", "rqjax/scoring/*.py")
TABLES = (
    Table(
        "Milliseconds of attention and of appending a token where no unit is complete, and the ratio of those in pages"
        " to those without",
        rows=("strategy",),
        columns=(),
        values=("attend_ms", "attend_in_pages", "append_ms", "append_in_pages"),
        each=("tokens",),
    ),
)


def check(point: dict[str, Any]) -> None:
    fitted.check(point["strategy"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one strategy: medians of calls that take turns."""
    heads, dim, tokens, rounds = point["kv_heads"], point["dim"], point["tokens"], point["rounds"]
    keys = jax.random.split(jax.random.key(0), 3)
    k, v = (jax.random.normal(key, (1, tokens, heads, dim), "bfloat16") for key in keys[:2])
    q = jax.random.normal(keys[2], (1, 1, heads * point["groups"], dim))
    strategy = rqjax.strategy(point["strategy"], jax.random.key(1), dim)
    append, attend = jax.jit(rqjax.append, donate_argnums=0), jax.jit(rqjax.attend)
    max_len = -(-(tokens + 4 * rounds) // GROWTH) * GROWTH

    def empty(paged: bool) -> rqjax.KVCache:
        if not paged:
            return strategy.cache(1, heads, max_len)
        cache = strategy.cache(1, heads, max_len, pages=2 * max_len // PAGE)
        assert cache.tables is not None
        some = np.random.default_rng(0).permutation(2 * max_len // PAGE)[: cache.tables.shape[1]]
        return dataclasses.replace(cache, tables=jnp.asarray(some[None], jnp.int32))

    growing = {paged: append(empty(paged), k, v) for paged in (False, True)}

    def appended(paged: bool) -> Any:
        growing[paged] = append(growing[paged], k[:, :1], v[:, :1])
        return growing[paged]

    calls: dict[str, Callable[[], Any]] = {}
    for paged in (False, True):
        cache = append(empty(paged), k, v)
        calls[f"attend {paged}"] = lambda cache=cache: attend(cache, q)
        calls[f"append {paged}"] = lambda paged=paged: appended(paged)
    ms = {name: 1e3 * float(np.median(seconds[2:, 1])) for name, seconds in turns(calls, rounds + 2, calls=2).items()}
    return {
        "attend_ms": ms["attend False"],
        "attend_in_pages": ms["attend True"] / ms["attend False"],
        "append_ms": ms["append False"],
        "append_in_pages": ms["append True"] / ms["append False"],
    }
