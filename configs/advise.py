"""Bits for each layer's keys and values by what they cost, against the same bits everywhere, in the same bytes.

Claim: at most 0.7 of the divergence of the family's uniform strategy. On llama-d128 it holds at 4 bits (0.69) and not
at 2 to 3: 0.85 to 0.89, and on its calibration text no finer steps of bits would get below 0.8.

    python -m experiments.run --config=configs/advise.py

What each layer's keys, and values, cost alone is measured on 2,048 tokens of training text; the divergence on four
windows of held-out text, with all keys and values in codes, those of a window at once. `windows` of the calibration are
read together. Committed are the rows of llama-d128 with turboquant_trellis; five minutes of one core; all
of the grid takes more than half an hour.
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
                "family": ("turboquant_trellis", "klt_trellis+pre_rope"),
                "model": ("llama-d128", "qwen2-d64", "gemma3-d256"),
                "uniform_bits": (2, 2.5, 3, 4),
            },
        }
    )
