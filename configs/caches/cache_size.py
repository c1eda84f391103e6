"""RotorQuant's Table 7: bytes of Qwen2.5-3B's cache at 8K tokens (36 layers, 2 KV heads, d = 128).

Claim: 75.6, 57.6 and 39.5 MB at 4, 3 and 2 bits instead of 289.0 MB. That is b + 0.1875 bits an element: keys with a
norm and a residual norm, values with a norm. The last column is of the cache in use: 128 newest and 4 first tokens in
full precision, quantizers included.

To see: the bytes are within half a percent of the published ones. Without the sketch of the residual (keys
`rotorquant`), codes take fewer bytes and have a higher cosine at all bits.

    python -m experiments.run --config=configs/caches/cache_size.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "cache_size",
            "layers": 36,
            "kv_heads": 2,
            "head_dim": 128,
            "context": 8192,
            "grid": {"bits": (4, 3, 2), "keys": ("rotorquant_prod", "rotorquant"), "values": ("rotorquant",)},
        }
    )
