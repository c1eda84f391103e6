"""Seconds: the machinery of a run on a small grid. Used by the tests.

python -m experiments.run --config=configs/codes/smoke.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "distortion",
            "n": 64,
            "seeds": 2,
            "grid": {"dim": (32,), "bits": (2,), "method": ("identity", "rotorquant"), "data": ("sphere", "one_hot")},
        }
    )
