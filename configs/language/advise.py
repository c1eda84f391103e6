"""Bits for each layer's keys and values by what they cost, against the same bits everywhere, in the same bytes.

Claim: at most 0.7 of the divergence of the family's uniform strategy. It holds in three of the twelve rows; in the
others it is 0.71 to 0.89.

    python -m experiments.run --config=configs/language/advise.py

The losses from each layer's keys, and from its values, alone are measured on 2,048 tokens of training text. The
divergence is measured on four windows of held-out text, with all keys and values in codes, those of a window at once.
`windows` of the calibration are read together. Another family: --config.grid.family="('klt_trellis+pre_rope',)".
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "advise",
            "corpus": "",
            "context": 1024,
            "windows": 2,
            "held_out": 4,
            "draws": 2,
            "grid": {
                "family": ("turboquant_trellis",),
                "model": ("llama-d128", "qwen2-d64", "gemma3-d256"),
                "uniform_bits": (2, 2.5, 3, 4),
            },
        }
    )
