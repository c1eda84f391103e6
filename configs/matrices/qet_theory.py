"""QET, Theorem 2: exchange leaves 1 - 1 / pi = 0.68169 of a Gaussian's variance within leaves.

Claim: one level 0.682; further levels, which the theorem does not cover, leave about 70 % each.

    python -m experiments.run --config=configs/matrices/qet_theory.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "exchange_theory",
            "n": 4096,
            "dim": 128,
            "seeds": 5,
            "grid": {"levels": (0, 1, 2, 3, 4, 5), "data": ("gaussian", "outlier_channels", "words", "kv")},
        }
    )
