"""Bytes of a whole model's compressed cache: RotorQuant's Table 7."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

import rqjax
from experiments.harness import published
from experiments.harness.table import Table
from rqjax import metrics

MADE_BY = ("rqjax/recipes/methods.py", "rqjax/cache/kv.py")
TABLES = (
    Table(
        "Cache of a whole model, MB of 2^20 bytes counted from the arrays",
        rows=("keys", "values"),
        columns=("bits",),
        values=("mb", "published_mb", "compression", "published_compression", "cosine", "with_window_mb"),
        footers=("float16_mb", "published_float16_mb"),
    ),
)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Encodes the Gaussian keys and values of one layer and multiplies by the layers."""
    layers, shape = point["layers"], (point["context"], point["kv_heads"], point["head_dim"])
    parts = [_encoded(point[name], point["bits"], seed, shape) for seed, name in enumerate(("keys", "values"))]
    size, float16 = layers * sum(size for size, _ in parts), layers * 2 * 2 * math.prod(shape)
    recipes = [rqjax.METHODS[point[name]] for name in ("keys", "values")]
    quantizers = lambda: [recipe(jax.random.key(2), shape[2], point["bits"]) for recipe in recipes]  # noqa: E731
    cache = jax.eval_shape(lambda: rqjax.KVCache.init(1, shape[1], shape[0], *quantizers()))
    mb, times = published.CACHE.get(point["bits"], (None, None))
    mine = (layers, *shape) == (36, 8192, 2, 128) and point["keys"] == "rotorquant_prod"
    return {
        "mb": size / 2**20,
        "compression": float16 / size,
        "cosine": sum(cosine for _, cosine in parts) / 2,
        "with_window_mb": cache.nbytes * layers / 2**20,
        "published_mb": mb if mine else None,
        "published_compression": times if mine else None,
        "float16_mb": float16 / 2**20,
        "published_float16_mb": published.CACHE_FLOAT16 if mine else None,
    }


def _encoded(method: str, bits: int, seed: int, shape: tuple[int, ...]) -> tuple[int, float]:
    """Returns the bytes of the codes of Gaussian vectors, and the cosine with the decoded vectors."""
    x = jax.random.normal(jax.random.key(seed), shape)
    codes, cosine = _encode(method, shape[-1], bits)(jax.random.key(seed + 2), x)
    return rqjax.nbytes(codes), float(cosine)


@functools.cache
def _encode(method: str, dim: int, bits: int) -> Callable[..., Any]:
    """Compiles once for keys and values."""

    def encode(key, x):
        quantizer = rqjax.METHODS[method](key, dim, bits)
        codes = quantizer.encode(x)
        return codes, metrics.cosine(x, quantizer.decode(codes))

    return jax.jit(encode)
