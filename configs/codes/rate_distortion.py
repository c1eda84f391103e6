"""Trellis-coded quantization against scalar levels and Shannon's bound, bits of equal length, fractional ones too.

Claim: at 1 to 4 bits a ring of exactly d b bits with 2^8 states has 1.1 to 1.4 times the least error there is. With
2^12 states it has less than 1.2 times, where Lloyd-Max levels have 1.4 to 2.4 times.

    python -m experiments.run --config=configs/codes/rate_distortion.py

`entropy_coded` is scalar codes with an ideal entropy coder, from theory: its vectors differ in length, and it stores no
norm. The others store a norm, or a scale, of 16 bits a vector. Half an hour on two cores, most of it for 2^11 and 2^12.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "rate_distortion",
            "n": 2000,
            "seeds": 5,
            "grid": {
                "dim": (128,),
                "bits": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
                "code": (
                    "lloyd_max",
                    "eden",
                    "entropy_coded",
                    "trellis_6",
                    "trellis_7",
                    "trellis_8",
                    "trellis_9",
                    "trellis_10",
                    "trellis_11",
                    "trellis_12",
                ),
                "data": ("sphere", "outlier_channels", "decaying_spectrum", "words"),
            },
        }
    )
