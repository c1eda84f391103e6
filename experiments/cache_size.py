"""Bytes of a whole model's compressed cache: RotorQuant's Table 7."""

from typing import Any

import jax

import rqjax
from experiments import published
from experiments.table import Table
from rqjax import metrics

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
    shape = (point["context"], point["kv_heads"], point["head_dim"])
    size, cosine, float16, quantizers = 0, [], 0, []
    for seed, method in enumerate((point["keys"], point["values"])):
        x = jax.random.normal(jax.random.key(seed), shape)
        quantizer = rqjax.METHODS[method](jax.random.key(seed + 2), point["head_dim"], point["bits"])
        quantizers.append(quantizer)
        codes = jax.jit(lambda quantizer, x: quantizer.encode(x))(quantizer, x)
        float16 += 2 * x.size * point["layers"]
        size += rqjax.nbytes(codes) * point["layers"]
        cosine.append(float(metrics.cosine(x, quantizer.decode(codes))))
    cache = jax.eval_shape(lambda: rqjax.KVCache.init(1, shape[1], shape[0], *quantizers))
    mb, times = published.CACHE.get(point["bits"], (None, None))
    mine = (point["layers"], *shape) == (36, 8192, 2, 128) and point["keys"] == "rotorquant_prod"
    return {
        "mb": size / 2**20,
        "compression": float16 / size,
        "cosine": sum(cosine) / 2,
        "with_window_mb": cache.nbytes * point["layers"] / 2**20,
        "published_mb": mb if mine else None,
        "published_compression": times if mine else None,
        "float16_mb": float16 / 2**20,
        "published_float16_mb": published.CACHE_FLOAT16 if mine else None,
    }
