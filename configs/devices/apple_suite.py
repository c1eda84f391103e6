"""Apple's devices: rotors against the dense rotation, and tokens per second with each cache, beside what is published.

Claims (RotorQuant, Table 3, a Mac mini M4): its Metal shader quantizes 1k to 64k vectors 1.6 to 31.3 times as fast as
the dense pipeline. (TurboQuant MLX, Llama 3.2 3B on an M4 Max): V2 LEAN is as fast as float16 at 8192 tokens, V3 runs
at 0.16 to 0.47 of it.

    python -m experiments.run --config=configs/devices/apple_suite.py

On a Mac with the extras `experiments`, `flax` and `mps` or `metal`; 12 GB of memory. Nobody has run it there yet:
`--config.rehearse=True` tries it in small anywhere. The decoder has the published one's shape, 28 layers, with random
weights in float16 and a vocabulary of bytes. The published weights have 4 bits, so that tokens per second compare with
each other only as shares of those with a float16 cache.
"""

from ml_collections import ConfigDict

STRATEGIES = ("v2_lean", "v2_rotated", "v2_rotated_qjl", "v3_3.5", "v3_3", "v3_2.5")


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "apple_suite",
            "rehearse": False,
            "dim": 128,
            "bits": 3,
            "model": "28 layers of Llama 3.2 3B",
            "weights": "float16",
            "baseline": "float16",
            "rounds": 5,
            "grid": {
                "case": (
                    *(f"quantize {n}" for n in (1024, 4096, 16_384, 65_536)),
                    *(f"generate {name} {t}" for t in (512, 1024, 2048, 4096, 8192) for name in STRATEGIES),
                )
            },
        }
    )
