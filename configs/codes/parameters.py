"""RotorQuant's Table 1: parameters of a dense rotation against those of rotors, at 3 bits.

Claim: 44 times fewer at d = 128, 3063 times at 4096. The paper counts inconsistently (dense: d^2 + 15 at 128, d^2 + 4
elsewhere; rotors: 8 ceil(d/3) + 28 at 128, 4 ceil(d/3) + 14 elsewhere). Ours are the numbers in the arrays: three for
each rotor, since a bivector is enough.

To see: a dense rotation has 62 to 225 times as many numbers as the others at d = 128, and 2,046 to 8,156 times as many
at 4096. Its count grows with the square of d, the others' with d.

    python -m experiments.run --config=configs/codes/parameters.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "parameters",
            "grid": {
                "dim": (128, 256, 512, 1024, 4096),
                "bits": (3,),
                "method": ("turboquant", "rotorquant", "rotor_chain", "hadamard", "planarquant", "isoquant"),
            },
        }
    )
