"""A million vectors through a trellis of 2^8 states: speed, and memory, which stays below 4 GB.

    python -m experiments.run --config=configs/codes/trellis_memory.py

The vectors themselves are 512 MB. Two minutes on two cores; nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "trellis_throughput",
            "rounds": 1,
            "grid": {"shape": ((1_000_000, 128),), "bits": (3,), "state_bits": (8,)},
        }
    )
