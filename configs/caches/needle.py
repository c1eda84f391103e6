"""RotorQuant, section 5.5: needles found by their codes at 2, 3 and 4 bits among 512, 2048 and 8192 keys.

Claim: 9 of 9 for RotorQuant and TurboQuant. Expected: all found where the query is the needle's key. With a query at a
cosine of 0.5 some are missed at 2 bits, and the residual sketch misses more than the bit it costs finds.

    python -m experiments.run --config=configs/caches/needle.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "needle",
            "dim": 128,
            "needles": 64,
            "seeds": 5,
            "grid": {
                "similarity": (1.0, 0.5),
                "method": ("turboquant", "turboquant_prod", "rotorquant", "rotorquant_prod"),
                "context": (512, 2048, 8192),
                "bits": (2, 3, 4),
            },
        }
    )
