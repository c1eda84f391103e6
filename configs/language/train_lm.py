"""Trains the decoders of `results/models` on the text of Python's standard library, byte by byte.

There are four families of four layers each. Head dimensions are 128 (Llama), 64 (Qwen 2, with biases on the keys) and
256 (Gemma 3, with local layers); latents have 128 dimensions (DeepSeek V2, without experts). The last tenth of the
tokens is seen in the long context, that of the validation windows; without local layers the curve falls there. One file
in fifty of Python 3.11.7's library is held out, whichever Python runs (experiments/corpus); `trained_on.txt` in
`folder` has the digests of the files trained on.

    python -m experiments.run --config=configs/language/train_lm.py
    python -m experiments.run --config=configs/language/train_lm.py --config.corpus=my/texts --config.vocabulary=2048

A one-minute setting: --config.tokens=200000 --config.grid.model="('qwen2-d64',)"
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "train_lm",
            "corpus": "",
            "vocabulary": 256,
            "folder": "runs/models",
            "seed": 0,
            "tokens": 6_000_000,
            "batch_tokens": 4096,
            "context": 512,
            "long_context": 2048,
            "long_share": 0.1,
            "learning_rate": 3e-3,
            "every": 100,
            "valid_windows": 16,
            "grid": {"model": ("llama-d128", "qwen2-d64", "gemma3-d256", "deepseek-r128")},
        }
    )
