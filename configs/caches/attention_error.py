"""Attention from compressed caches on synthetic queries and keys: keys and values apart, centered or not, any window.

Claim (users of compressed caches): models whose keys have a large common part, such as Qwen2.5, break at 3 or 4 bits.
Expected: with a bias of ten deviations on every key the divergence of the weights grows thirty- to ninetyfold, on loud
channels two- to sixteenfold. With the mean key taken off it is what it is without the bias. QJL in the place of a bit
multiplies it by five. Bits are worth more in keys than in values. Seven minutes on two cores.

    python -m experiments.run --config=configs/caches/attention_error.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "attention_error",
            "context": 2048,
            "queries": 64,
            "heads": 4,
            "dim": 128,
            "seeds": 5,
            "grid": {
                "data": ("gaussian", "outlier_channels", "key_bias", "outlier_channels_and_key_bias"),
                "centered": ("as it is", "centered"),
                "keep": ("128+4", "0+0"),
                "strategy": (
                    "v3_4",
                    "v3_3",
                    "v3_2",
                    "v3_4/v3_2",
                    "v3_2/v3_4",
                    "rotorquant_3",
                    "rotor_chain_3",
                    "eden_3",
                    "turboquant_prod_3",
                    "v2_lean",
                    "v2_rotated_qjl",
                ),
            },
        }
    )
