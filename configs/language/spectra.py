"""Rank of keys and values, of a pretrained decoder and of the models trained here.

Claim: the models trained here have no rank to speak of, so that transform codes look a hundred times too good on them.

    python -m experiments.run --config=configs/language/spectra.py

2,048 tokens of held-out files of Python's library. The
mean is not subtracted; the first four tokens are left out. Needs the extra `real`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "spectra",
            "tokens": 2048,
            "sinks": 4,
            "corpus": "",
            "grid": {
                "model": ("smollm2-135m", "llama-d128", "qwen2-d64", "gemma3-d256"),
                "part": ("keys before rotary positions", "keys", "values"),
            },
        }
    )
