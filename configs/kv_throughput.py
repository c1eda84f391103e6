"""Decode attention and append on a CPU for each strategy, against a float32 and a bfloat16 cache in the same run.

Claim (TurboQuant MLX, a whole model on an M4 Max): V2 LEAN runs at 0.9 to 1.05 of float16, V3 at 0.16 to 0.47, because
it decodes the history at each step. Here nothing is decoded. Expected on two CPU cores (8 KV heads, d = 128) at 8192
tokens: twice float32's speed at 4 and 3 bits with one norm a token, 1.6 times with groups of 64; with 8 query heads a
KV head 1.85 and 1.35 times, with one 1.4 times; at 32768 tokens 2.1 to 2.9 times. Ratios vary by 20 %.

    python -m experiments.run --config=configs/kv_throughput.py

Shapes are "<query heads a KV head>x<tokens>". Nine minutes on two cores; nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "kv_throughput",
            "kv_heads": 8,
            "dim": 128,
            "rounds": 24,
            "grid": {
                "shape": ("3x512", "3x1024", "3x2048", "3x4096", "3x8192", "3x32768", "1x8192", "8x8192"),
                "strategy": (
                    "v2_lean",
                    "v2_rotated",
                    "v2_rotated_qjl",
                    "rtn",
                    "v3_4",
                    "v3_3.5",
                    "v3_3",
                    "v3_2.5",
                    "v3_2",
                    "rotorquant",
                    "rotor_chain",
                    "eden",
                    "bfloat16",
                ),
            },
        }
    )
