"""Trellis-coded quantization against scalar levels and Shannon's bound, bits of equal length, fractional ones too.

Claim: at 1 to 4 bits a ring of exactly d b bits with 2^8 states has 1.3 to 1.6 times the least error there is. With
2^12 states it has 1.3 to 1.4 times, where Lloyd-Max levels have 1.7 to 2.8 times, and up to 3.3 times at half bits.

    python -m experiments.run --config=configs/codes/rate_distortion.py

The least error is Shannon's 4^-b at the b bits that are stored, a norm or scale of 16 bits a vector included. In 128
dimensions this alone is a factor of 1.19. `entropy_coded` is scalar codes with an ideal entropy coder, from theory; its
vectors differ in length. Most of the time is for 2^11 and 2^12.
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
