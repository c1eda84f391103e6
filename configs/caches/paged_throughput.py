"""Decode attention and append of a cache in pages that lie in random order, against the same cache without, on a CPU.

To see: appending takes as long where no unit is complete, attention 1.20 to 1.26 times as long. Pages are copied side
by side before a block of them is unpacked; the copy reads and writes as many bytes as there are codes.

    python -m experiments.run --config=configs/caches/paged_throughput.py

Needs the machine to itself.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "paged_throughput",
            "kv_heads": 8,
            "groups": 3,
            "dim": 128,
            "rounds": 60,
            "grid": {"tokens": (8192,), "strategy": ("v3_3", "eden_4", "turboquant_trellis_3", "bfloat16")},
        }
    )
