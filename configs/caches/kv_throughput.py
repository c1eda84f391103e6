"""Decode attention and append on a CPU for each strategy, against plain float32 and bfloat16 caches in the same run.

Claim: attention to codes pays where the history is long and few queries share a head. In short caches its many small
kernels cost more than the bytes that they save, and a plain bfloat16 cache is the faster one. The plain caches have no
slot to spare; the fastest of two layouts of keys and `jax.nn.dot_product_attention` counts.

    python -m experiments.run --config=configs/caches/kv_throughput.py --workdir=results/kv_throughput

Shapes are "<query heads a KV head>x<tokens>". Nothing else may run beside it, ten minutes on two cores. Ratios vary
by a third from run to run. `configs/caches/cache_choice.py` has codes that learn, and 2,048 and 32,768 tokens.
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
                "shape": ("3x512", "3x4096", "3x8192", "1x8192", "8x8192"),
                "strategy": (
                    "v2_lean",
                    "v2_rotated",
                    "v2_rotated_qjl",
                    "rtn",
                    "v3_4",
                    "v3_3.5",
                    "v3_3",
                    "v3_2.5",
                    "eden",
                    "turboquant_trellis_3",
                    "turboquant_trellis_2",
                    "bfloat16",
                ),
            },
        }
    )
