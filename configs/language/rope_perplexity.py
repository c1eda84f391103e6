"""Keys before rotary positions, or less a mean that turns with them: what a pretrained decoder loses.

Claims: a transform code of keys before rotary positions (KVQuant, Hooper et al. 2024, arXiv:2401.18079) takes off
most of what keys lose. A mean that turns with the positions helps where keys have one (Qwen 2 and 2.5).

    python -m experiments.run --config=configs/language/rope_perplexity.py

Keys alone are in codes: "/bfloat16" has exact values. ":calibrated" has the mean of the calibration text in the place
of the mean of its own first keys. Rows with both sides in codes are those of `configs/language/leaderboard.py`, whose
setting this is. Needs the extra `real`.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    strategies = ("eden_2/bfloat16", "eden_2/bfloat16+turned", "eden_2/bfloat16+turned:calibrated")
    learned = ("klt_trellis_2/bfloat16", "klt_trellis_2/bfloat16+pre_rope")
    config.update({"grid": {"keep": ("128+4",), "strategy": (*strategies, *learned)}})
    return config
