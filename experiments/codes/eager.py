"""Operations called outside `jax.jit` beside the same ones compiled by the caller, in turns in one run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.harness.table import Table
from experiments.harness.timing import turns
from rqjax.core import unknown_name

OPERATIONS = ("encode", "decode", "dot", "append", "attend", "search")
MADE_BY = ("rqjax/core/dispatch.py",)
TABLES = (
    Table(
        "Milliseconds of a call outside jit and of one inside, and what the former takes more than 3 times the latter",
        rows=("method", "operation"),
        columns=(),
        values=("eager_ms", "jitted_ms", "ratio", "over_three_times_ms"),
    ),
)


def check(point: dict[str, Any]) -> None:
    _ = rqjax.METHODS[point["method"]]
    if point["operation"] not in OPERATIONS:
        raise unknown_name("operation", point["operation"], OPERATIONS)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures medians over the rounds, after two that compile."""
    function, arguments = _call(point)
    jitted = jax.jit(function)
    times = turns({"eager": lambda: function(*arguments), "jitted": lambda: jitted(*arguments)}, point["rounds"] + 2)
    eager, inside = (1e3 * float(np.median(times[name][2:])) for name in ("eager", "jitted"))
    return {
        "eager_ms": eager,
        "jitted_ms": inside,
        "ratio": eager / inside,
        "over_three_times_ms": max(0.0, eager - 3 * inside),
    }


def _call(point: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function, and arguments for it: `n` vectors, a cache of as many tokens, an index of as many rows."""
    n, dim, key = point["n"], point["dim"], jax.random.key(0)
    quantizer = rqjax.METHODS[point["method"]](key, dim, point["bits"])
    x = jax.random.normal(jax.random.key(1), (n, dim))
    codes, tokens = quantizer.encode(x), jnp.broadcast_to(x[None, :, None], (1, n, 2, dim))
    cache = rqjax.append(rqjax.KVCache.init(1, 2, n + 1, quantizer, quantizer, window=16), tokens, tokens)
    match point["operation"]:
        case "encode":
            return lambda quantizer, x: quantizer.encode(x), (quantizer, x)
        case "decode":
            return lambda quantizer, codes: quantizer.decode(codes), (quantizer, codes)
        case "dot":
            return lambda quantizer, y, codes: quantizer.dot(y, codes), (quantizer, x[:5], codes)
        case "append":
            return rqjax.append, (cache, tokens[:, :1], tokens[:, :1])
        case "attend":
            return rqjax.attend, (cache, tokens[:, :1])
    return lambda index, y: index.search(y, 10), (rqjax.Index.build(quantizer, x), x[:5])
