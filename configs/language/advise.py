"""Bits for each layer's keys and values by what they cost, against the same bits everywhere, in the same bytes.

    python -m experiments.run --config=configs/language/advise.py

The losses from each layer's keys, and from its values, alone are measured on 1,024 tokens of calibration text, four
kinds alike, `read` in a row. The divergence is measured as in `configs/language/leaderboard.py`: 8 windows of 1,024
held-out tokens. For both the newest 128 tokens and the first 4 are exact. A draw takes 40 minutes of a core, and 10 for
each number of bits. Another family: --config.grid.family="('turboquant_trellis',)". Needs the extra `real`.
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
            "windows": 2,
            "draws": 1,
            "grid": {
                "family": ("klt_trellis+pre_rope",),
                "model": ("smollm2-135m",),
                "uniform_bits": (2, 2.5),
            },
        }
    )
