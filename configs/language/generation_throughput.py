"""Tokens per second of whole decoders on a CPU with each cache, beside the same decoder with a float32 cache.

Claim (TurboQuant MLX, Llama 3.2 3B on an M4 Max): V2 LEAN is as fast as float16 or a little faster at 8K, V3 runs at
0.16 to 0.47 of it. Expected here: no slower than the float32 cache at 8192 tokens.

    python -m experiments.run --config=configs/language/generation_throughput.py

Nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "generation_throughput",
            "rounds": 5,
            "baseline": "float32",
            "weights": "float32",
            "grid": {
                "model": ("llama-d128", "4 layers of Llama 3.2 3B"),
                "tokens": (512, 2048, 8192),
                "strategy": ("v2_lean", "v3_4", "v3_3"),
            },
        }
    )
