"""TurboQuant's 2.5 and 3.5 bits: some channels get one bit more.

Claim: (32 * 3 + 96 * 2) / 128 is said to be 2.5 bits. It is 2.25; 64@3+64@2 is 2.5, and so is 32@4+96@2.

To see: 32@3+96@2, said to be 2.5 bits, is 2.25. Two splits are 2.5 bits; 64@3+64@2 has the smaller error on all data.
Every error is within 3 % of Lloyd-Max's theory.

    python -m experiments.run --config=configs/codes/fractional.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "fractional",
            "n": 2000,
            "seeds": 5,
            "grid": {
                "split": (
                    "128@2",
                    "32@3+96@2",
                    "64@3+64@2",
                    "32@4+96@2",
                    "96@3+32@2",
                    "128@3",
                    "32@4+96@3",
                    "64@4+64@3",
                    "128@4",
                ),
                "data": ("sphere", "outlier_channels", "words"),
            },
        }
    )
