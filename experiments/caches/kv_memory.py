"""Bytes of the caches of whole models: TurboQuant MLX's "KV-Cache Compression at T=8192"."""

import functools
from typing import Any

import jax

import rqjax
from experiments.harness import published
from experiments.harness.table import Table
from experiments.models import fitted
from rqjax.cache.kv import GROWTH
from rqjax.core import TokenArray, check_int, unknown_name

MODELS = {
    "Llama 3.2 3B": (28, 8, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Gemma 3 4B": (34, 4, 256),
    "Qwen2.5 3B": (36, 2, 128),
    "SmolLM2 135M": (30, 3, 64),
}
"""Layers, heads of keys and values, head dimension."""
SAMPLES = 4096
PACKED = ("uint8", "uint32")
"""Dtypes of codes."""

MADE_BY = ("rqjax/recipes/*.py", "rqjax/cache/kv.py")
TABLES = (
    Table(
        "Cache of a whole model, MB of 10^6 bytes counted from the arrays",
        rows=("strategy",),
        columns=("model",),
        values=("mb", "published_mb", "compression", "published_compression"),
        each=("context",),
    ),
    Table(
        "What the bytes are, MB: codes, norms or scales and biases, tokens in full precision, quantizers",
        rows=("strategy",),
        columns=("model",),
        values=("codes_mb", "scales_mb", "exact_mb", "quantizers_mb"),
        each=("context",),
    ),
)


def check(point: dict[str, Any]) -> None:
    if point["model"] not in MODELS:
        raise unknown_name("model", point["model"], MODELS)
    if fitted.learns(point["strategy"]):
        fitted.check(point["strategy"])
    elif point["strategy"] != "float16":
        jax.eval_shape(lambda: rqjax.strategy(point["strategy"], jax.random.key(0), 64).cache(1, 1, 256))
    check_int("context", point["context"], 0, 2**30)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Counts one layer's cache, of the next multiple of 256 tokens above the context, and multiplies by the layers."""
    layers, heads, dim = MODELS[point["model"]]
    tokens = (point["context"] // GROWTH + 1) * GROWTH
    float16 = layers * 2 * 2 * heads * dim * tokens
    theirs = (point["model"], tokens) == ("Llama 3.2 3B", 8448)
    mb, times = published.KV_MEMORY.get(point["strategy"] if theirs else "", (None, None))
    result = {"published_mb": mb, "published_compression": times}
    if point["strategy"] == "float16":
        return {"mb": float16 / 1e6, "compression": 1.0, **result}
    # The shapes of a quantizer's arrays are those that any samples lead to.
    noise = functools.partial(jax.random.normal, jax.random.key(0), (heads, SAMPLES, dim))
    strategy = fitted.strategy(point["strategy"], dim, noise)
    cache = jax.eval_shape(lambda: strategy.cache(1, heads, tokens, rope=rqjax.Rope(1e4)))
    arrays = jax.tree.leaves((cache.keys, cache.values), is_leaf=TokenArray.is_one)
    parts = {
        "codes": [leaf for leaf in arrays if leaf.dtype in PACKED],
        "scales": [leaf for leaf in arrays if leaf.dtype not in PACKED],
        "exact": [cache.exact_keys, cache.exact_values],
        "quantizers": [cache.key_quantizer, cache.own_value_quantizer],
    }
    sizes = {f"{name}_mb": layers * rqjax.nbytes(part) / 1e6 for name, part in parts.items()}
    return {"mb": layers * cache.nbytes / 1e6, "compression": float16 / (layers * cache.nbytes), **sizes, **result}
