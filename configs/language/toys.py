"""Divergence of the decoders of `results/models`, small byte models trained here: a test of code and no claim.

Keys of these models before rotary positions, and their values, lie in a tenth to a quarter of their dimensions
(`spectra`). Transform codes therefore lose next to nothing: 0.0007 to 0.004 of `eden_2`'s divergence, where a
pretrained decoder has a fifth.

    python -m experiments.run --config=configs/language/toys.py

Held-out files of Python's library, 8 windows of 2,048 bytes; what learns is fitted to 6,144 bytes of training text.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    strategies = ("eden_4", "eden_2", "turboquant_trellis_2", "klt_trellis_2", "klt_trellis_2+pre_rope")
    models = ("llama-d128", "qwen2-d64", "gemma3-d256")
    grid = {"model": models, "keep": ("0+4",), "strategy": strategies}
    config.update({"corpus": "", "fitted_on": "", "context": 2048, "grid": grid})
    return config
