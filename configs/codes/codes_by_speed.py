"""Error of codes over Shannon's bound against the speed of encoding and decoding.

Claim: levels behind any rotation are alike in error and differ in the speed of encoding. A trellis leaves 0.57 to 0.65
of that error and encodes 130 to 230 times as slowly as `rotorquant`; `nested_e8` lies between in both.

    python -m experiments.run --config=configs/codes/codes_by_speed.py

Bits are those that are stored, norms and scales included. Three minutes; nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "codes_by_speed",
            "n": 2000,
            "seeds": 3,
            "timed": 16384,
            "rounds": 7,
            "grid": {
                "dim": (128,),
                "data": ("sphere",),
                "method": (
                    "affine",
                    "rotorquant",
                    "hadamard",
                    "rotor_chain",
                    "turboquant",
                    "eden",
                    "nested_e8",
                    "rotorquant_trellis",
                    "turboquant_trellis",
                ),
                "bits": (2, 3, 4),
            },
        }
    )
