"""Scales of eight bits on a logarithmic scale in the place of sixteen: what short vectors gain at equal stored bits.

Claim: in up to 64 dimensions the eight bits lower the error where they go to the coordinates. The exception is a
trellis code of 4 bits in 64 dimensions on loud channels, whose error is as small as that of the scale.

    python -m experiments.run --config=configs/codes/scale_bits.py

`bits` are those of a coordinate's index beside a scale of 16 bits; beside one of 8 bits, 8 more are for the indices.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "scale_bits",
            "n": 2000,
            "seeds": 5,
            "grid": {
                "method": ("eden", "turboquant_trellis"),
                "dim": (16, 32, 64),
                "bits": (1, 2, 3, 4),
                "data": ("sphere", "outlier_channels"),
            },
        }
    )
