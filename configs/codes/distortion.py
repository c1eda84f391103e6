"""RotorQuant's Table 4 and TurboQuant's Figure 3: error of every method at every bit width, isotropic and not.

Claim: after a uniform rotation the error is that of the Lloyd-Max quantizer whatever the data. Rotors in blocks of
three equal it on isotropic data only. The published RotorQuant column is a codebook of the wrong scale.

To see: at 3 bits the error of `turboquant` is the same on all data within 3 %; that of `turboquant_trellis` is 43 %
lower. `rotorquant` equals `turboquant` on the sphere, but has 3.3 times its error on the decaying spectrum.

    python -m experiments.run --config=configs/codes/distortion.py

Expected on the sphere, d = 128, 1 to 4 bits: 0.361 0.116 0.0340 0.0093 for turboquant, rotorquant and hadamard;
0.457 0.197 0.081 0.032 for rotorquant_paper.
"""

from ml_collections import ConfigDict

from rqjax import METHODS


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "distortion",
            "n": 2000,
            "seeds": 5,
            "grid": {
                "dim": (128,),
                "bits": (1, 2, 3, 4, 5),
                "method": tuple(METHODS),
                "data": (
                    "sphere",
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
