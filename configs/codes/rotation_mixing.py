"""Mixing of structured channels by each rotation, with no rotation as a row: isotropic data cannot show it.

Claim: one layer of rotors in blocks of three is seven times worse than a uniform rotation on outlier channels at
3 bits. With one randomized Hadamard round it is as good or better on every data set, but only if the rotors come first
(`rotor_chain`; `hadamard_rotor` is the other order).

To see: on Gaussian data all rotations are alike, and no rotation (`identity`) is as good. On outlier channels
`identity` has 9 times the error of a uniform rotation (`dense`), one layer of rotors 7 times. `rotor_chain` is nowhere
more than 1 % above `dense`.

    python -m experiments.run --config=configs/codes/rotation_mixing.py

Expected: the reference column, within 12 % where no channel scales are drawn at random. Four minutes on two cores.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "rotation_mixing",
            "n": 2000,
            "seeds": 20,
            "grid": {
                "dim": (128,),
                "bits": (3,),
                "rotation": (
                    "identity",
                    "dense",
                    "hadamard",
                    "hadamard_2",
                    "givens",
                    "givens_chain",
                    "quaternion",
                    "quaternion_chain",
                    "rotor",
                    "rotor_5",
                    "rotor_10",
                    "butterfly",
                    "butterfly_hadamard",
                    "hadamard_rotor",
                    "rotor_chain",
                ),
                "data": (
                    "gaussian",
                    "outlier_channels",
                    "lognormal_channels",
                    "one_hot",
                    "decaying_spectrum",
                    "decaying_spectrum_rotated",
                    "words",
                ),
            },
        }
    )
