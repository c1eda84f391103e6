"""Decode attention on a CPU for the strategies that README.md compares, against plain float32 and bfloat16 caches.

Claim: from 8,192 tokens on codes of levels are read 1.1 to 2 times as fast as bfloat16, trellis codes 2.7 to 5 times as
slowly at every length: the level of each coordinate is looked up by a state of eight bits.

    python -m experiments.run --config=configs/cache_choice.py --workdir=results/cache_choice

As `configs/kv_throughput.py`, at two lengths. Nothing else may run beside it.
"""

from ml_collections import ConfigDict

from configs import kv_throughput


def get_config() -> ConfigDict:
    config = kv_throughput.get_config()
    strategies = ("bfloat16", "eden_4", "eden_3", "turboquant_trellis_3", "turboquant_trellis_2", "rotorquant_3")
    learned = ("rotorquant_allocated_3", "rotorquant_allocated_trellis_3", "klt_trellis_2", "klt_trellis_3")
    config.update({"grid": {"shape": ("3x2048", "3x8192", "3x32768"), "strategy": strategies + learned}})
    return config
