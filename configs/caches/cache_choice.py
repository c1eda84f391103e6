"""Decode attention on a CPU for the strategies that README.md compares, against plain float32 and bfloat16 caches.

Claim: from 8,192 tokens on codes of levels are read 1.2 to 2.7 times as fast as bfloat16. Trellis codes are read 1.0
to 2.2 times as fast, codes of learned rotations 0.7 to 2.9 times. At 2,048 tokens all are slower. Beside a
float32 cache of 32,768 tokens codes have 0.8 to 1.05 of its speed.

    python -m experiments.run --config=configs/caches/cache_choice.py --workdir=results/cache_choice

As `configs/caches/kv_throughput.py`, at three lengths. Nothing else may run beside it.
"""

from ml_collections import ConfigDict

from configs.caches import kv_throughput


def get_config() -> ConfigDict:
    config = kv_throughput.get_config()
    trellises = ("turboquant_trellis_3", "turboquant_trellis_2")
    learned = ("rotorquant_allocated_3", "rotorquant_allocated_trellis_3", "klt_trellis_3")
    strategies = ("bfloat16", "eden_4", "eden_3", *trellises, "rotorquant_3", *learned)
    config.update({"grid": {"shape": ("3x2048", "3x8192", "3x32768"), "strategy": strategies}})
    return config
