"""Error of the methods on real embeddings: WordLlama's tokens, and a sentence encoder's passages of text.

Claim: a uniform rotation has the error of the sphere on both, whatever mean and spectrum they have. Rotors in blocks of
three and no rotation have more on the passages, whose coordinates differ.

    python -m experiments.run --config=configs/codes/distortion_real.py

Relative mean squared error as in `configs/codes/distortion.py`; the mean that passages have in common is kept. Needs
the extra `real`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "distortion",
            "n": 2000,
            "seeds": 5,
            "dim": 0,
            "grid": {
                "bits": (1, 2, 3, 4),
                "method": ("identity", "rotorquant", "rotor_chain", "turboquant", "eden", "turboquant_trellis"),
                "data": ("wordllama", "passages"),
            },
        }
    )
