"""Bits for each layer's keys and values by what they cost, against the same bits everywhere, in the same bytes.

    python -m experiments.run --config=configs/language/advise.py

The losses from each layer's keys, and from its values, alone are measured on 2,048 tokens of calibration text, four
kinds alike, `read` in a row. The divergence is measured as in `configs/language/leaderboard.py`: 8 windows of 1,024
held-out tokens. For both the newest 128 tokens and the first 4 are exact. A draw takes an hour of a core. Another
family: --config.grid.family="('klt_trellis+pre_rope',)".
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "advise",
            "corpus": "mixed",
            "context": 1024,
            "held_out": 8,
            "chunk": 16,
            "keep": "128+4",
            "read": 512,
            "windows": 4,
            "draws": 1,
            "grid": {
                "family": ("turboquant_trellis",),
                "model": ("smollm2-135m",),
                "uniform_bits": (2, 2.5, 3, 4),
            },
        }
    )
