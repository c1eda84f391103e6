"""Cost of calling operations outside `jax.jit`, on small arrays, where calling takes most of the time.

Claim: a call outside jit takes at most 3 times as long as one inside, and a millisecond. It is compiled once for each
shape; what is left is the checks of arguments, which need numbers that a jitted call does not know.

    python -m experiments.run --config=configs/codes/eager.py

A minute on two cores; nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "eager",
            "n": 100,
            "dim": 128,
            "bits": 4,
            "rounds": 100,
            "grid": {
                "method": ("turboquant", "rotorquant", "turboquant_trellis", "affine"),
                "operation": ("encode", "decode", "dot", "append", "attend", "search"),
            },
        }
    )
