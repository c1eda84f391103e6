"""The leaderboard's best and rivals at 4,096 tokens, four times those of the leaderboard.

    python -m experiments.run --config=configs/language/long_perplexity.py

One window of each kind of text. The rest is `configs/language/leaderboard.py`. All lose 1.4 to 2.4 times as much as
there, and what learns most: `klt_trellis_2+pre_rope` has 0.28 of `eden_2`'s divergence, with 1,024 tokens 0.19.
`klt_joint_2.167+centered+pre_rope` has 0.19 of that, with 1,024 tokens 0.17, and 1.1 times that of `eden_4`.
Needs the extra `real`.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    learned = ("klt_trellis_2+pre_rope", "klt_joint_2.167+centered+pre_rope")
    strategies = ("eden_4", "eden_2", "turboquant_trellis_2", "kivi_2", "q4_0", *learned)
    grid = {"keep": ("128+4",), "strategy": strategies}
    config.update({"context": 4096, "windows": 4, "seeds": 1, "grid": grid})
    return config
