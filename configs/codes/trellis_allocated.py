"""A transform code with a trellis in the place of levels: what the two take off a uniform rotation's error, held out.

Claim: a ring through coordinates of different bits takes a third off what learned rotors and bits by variance leave.

    python -m experiments.run --config=configs/codes/trellis_allocated.py

All at the bits of `turboquant`. Twenty minutes on two cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "train_rotor",
            "n": 8192,
            "seeds": 5,
            "grid": {
                "dim": (128,),
                "bits": (3,),
                "parametrisation": ("dense", "rotorquant_allocated", "rotorquant_allocated_trellis"),
                "data": ("sphere", "outlier_channels", "lognormal_channels", "decaying_spectrum", "words", "kv"),
            },
        }
    )
