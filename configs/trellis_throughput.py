"""Speed of trellis codes on a CPU, as ratios in one run, and their memory.

Claim: encoding takes 1.5 times less than the Viterbi algorithm with argmin, and time in proportion to vectors,
coordinates and states; decoding runs at 0.6 of the speed of copying what it returns.

    python -m experiments.run --config=configs/trellis_throughput.py

Nothing else may run beside it. The most memory is read before the plain algorithm runs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "trellis_throughput",
            "rounds": 5,
            "grid": {
                "shape": ((16384, 128), (65536, 128), (16384, 256)),
                "bits": (1, 2, 3, 4),
                "state_bits": (8, 10),
            },
        }
    )
