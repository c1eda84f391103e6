"""Quantizers trained for what attention makes of their errors, beside those trained for the errors themselves.

Each loss trains the rotors of `rotor_chain` and levels of each coordinate on 6,144 tokens of training text; attention
is that of held-out text. "none" is not trained: random rotors, Lloyd's levels.

    python -m experiments.run --config=configs/caches/attention_losses.py
    python -m experiments.run --config=configs/caches/attention_losses.py --config.grid.side="('values',)" \\
        --config.grid.loss="('none','distortion','output')"

The committed table is of the first two models; a row of the third takes minutes. It has three losses more, which rqjax
no longer has: soft codes, the closed form of a Gaussian's error, and the divergence of the softmax. None lowers the
divergence below that of the plain squared error by more than the seeds vary. A row's `revision` has their code.
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
                "model": ("llama-d128", "qwen2-d64", "gemma3-d256"),
                "side": ("keys",),
                "bits": (2, 3),
                "loss": ("none", "distortion", "scores"),
            },
        }
    )
