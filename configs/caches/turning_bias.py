"""Keys with a bias before rotary positions: attention from caches that subtract nothing, a mean, or a mean that turns.

Claim (issue 21385 of llama.cpp): Qwen 2 and 2.5 break in quantized caches, for the bias of their keys. Its norm is 605
in the first layer and 921 in the last layer of Qwen2.5-7B, 22 in the middle. Expected: the mean of the first keys
(`+centered`) repairs a short context and fails in a long one, where the bias has turned; `+turned` repairs both.

    python -m experiments.run --config=configs/caches/turning_bias.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "turning_bias",
            "queries": 32,
            "heads": 2,
            "dim": 128,
            "theta": 1e6,
            "loud": 1,
            "seeds": 3,
            "grid": {
                "norm": (605,),
                "tokens": (1024, 8192, 32768),
                "strategy": ("eden_3", "eden_3+centered", "eden_3+turned"),
            },
        }
    )
