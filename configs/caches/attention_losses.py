"""Quantizers trained for what attention makes of their errors, beside those trained for the errors themselves.

Each loss trains the rotors of `rotor_chain` and levels of each coordinate on 6,144 tokens of training text; attention
is that of held-out text. "none" is not trained: random rotors, Lloyd's levels.

    python -m experiments.run --config=configs/caches/attention_losses.py
    python -m experiments.run --config=configs/caches/attention_losses.py --config.grid.side="('values',)" \\
        --config.grid.loss="('none','distortion','output')"

Training for the scores never gets below where it began. The gain of training for the squared error is within what the
seeds vary. A row takes a minute, a row of `gemma3-d256` several.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "attention_losses",
            "corpus": "",
            "context": 2048,
            "windows": 3,
            "queries": 128,
            "newest": 256,
            "steps": 300,
            "seeds": 5,
            "grid": {
                "model": ("llama-d128", "qwen2-d64"),
                "side": ("keys",),
                "bits": (2, 3),
                "loss": ("none", "distortion", "scores"),
            },
        }
    )
