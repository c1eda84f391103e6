"""Bytes of the caches of whole models: TurboQuant MLX's "KV-Cache Compression at T=8192"."""

from typing import Any

import jax

import rqjax
from experiments.harness import published
from experiments.harness.table import Table
from rqjax.cache.kv import GROWTH
from rqjax.core import TokenArray, unknown_name

MODELS = {
    "Llama 3.2 3B": (28, 8, 128),
    "Llama 3.1 8B": (32, 8, 128),
    "Gemma 3 4B": (34, 4, 256),
    "Qwen2.5 3B": (36, 2, 128),
}
"""Layers, heads of keys and values, head dimension."""

MADE_BY = ("rqjax/recipes/strategies.py", "rqjax/cache/kv.py")
TABLES = (
    Table(
        "Cache of a whole model, MB of 10^6 bytes counted from the arrays",
        rows=("strategy",),
        columns=("model",),
        values=("mb", "published_mb", "compression", "published_compression"),
    ),
    Table(
        "What the bytes are, MB: codes, norms or scales and biases, tokens in full precision, quantizers",
        rows=("strategy",),
        columns=("model",),
        values=("codes_mb", "scales_mb", "exact_mb", "quantizers_mb"),
    ),
)


def check(point: dict[str, Any]) -> None:
    if point["model"] not in MODELS:
        raise unknown_name("model", point["model"], MODELS)
    if point["strategy"] != "float16":
        jax.eval_shape(lambda: rqjax.strategy(point["strategy"], jax.random.key(0), 64).cache(1, 1, 256))


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Counts one layer's cache, of the next multiple of 256 tokens above the context, and multiplies by the layers."""
    layers, heads, dim = MODELS[point["model"]]
    tokens = (point["context"] // GROWTH + 1) * GROWTH
    float16 = layers * 2 * 2 * heads * dim * tokens
    mb, times = (
        published.KV_MEMORY.get(point["strategy"], (None, None)) if point["model"] == "Llama 3.2 3B" else (None,) * 2
    )
    result = {"published_mb": mb, "published_compression": times}
    if point["strategy"] == "float16":
        return {"mb": float16 / 1e6, "compression": 1.0, **result}
    cache = jax.eval_shape(lambda: rqjax.strategy(point["strategy"], jax.random.key(0), dim).cache(1, heads, tokens))
    arrays = jax.tree.leaves((cache.keys, cache.values), is_leaf=TokenArray.is_one)
    parts = {
        "codes": [leaf for leaf in arrays if leaf.dtype == "uint8"],
        "scales": [leaf for leaf in arrays if leaf.dtype != "uint8"],
        "exact": [cache.exact_keys, cache.exact_values],
        "quantizers": [cache.key_quantizer, cache.own_value_quantizer],
    }
    sizes = {f"{name}_mb": layers * rqjax.nbytes(part) / 1e6 for name, part in parts.items()}
    return {"mb": layers * cache.nbytes / 1e6, "compression": float16 / (layers * cache.nbytes), **sizes, **result}
