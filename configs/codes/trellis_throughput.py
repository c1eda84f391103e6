"""Speed of trellis codes on a CPU, as ratios in one run, and their memory.

Claim: encoding is 1.5 times as fast as the Viterbi algorithm with argmin (here 2.4 to 4.9 times), and takes time in
proportion to vectors, coordinates and states. Decoding from 2^8 states was to run at 0.6 of the speed of copying what
it returns; it has 0.3 to 0.7.

    python -m experiments.run --config=configs/codes/trellis_throughput.py

Seven minutes on two cores; nothing else may run beside it. The most memory is read before the plain algorithm runs.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "trellis_throughput",
            "rounds": 3,
            "grid": {
                "shape": ((16384, 128), (32768, 128), (16384, 256)),
                "bits": (1, 2, 3, 4),
                "state_bits": (8, 10),
            },
        }
    )
