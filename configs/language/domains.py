"""Domains crossed: transform codes fitted on one kind of text and tested on all.

Claim: a code that learns loses more on text of another kind than it was fitted to. It still loses less than codes that
learn nothing. Text of several kinds to fit to is worth most of the difference.

    python -m experiments.run --config=configs/language/domains.py

To see: the first part holds. Fitted to another kind, text loses 1.0 to 1.8 times what it loses fitted to its own, with
`klt_joint` 1.0 to 2.8 times. Code loses the most with what was fitted to dialogue. For `klt_trellis` text of four kinds
is no better than the best of one, for `klt_joint` it is.

The setting is that of `configs/language/leaderboard.py`, which has the rows fitted to all four kinds. A row that names
no kind is fitted to Python's library. Needs the extra `real`.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard

STRATEGIES = ("klt_trellis_2+pre_rope", "klt_joint_2.167+centered+pre_rope")


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    del config.fitted_on
    grid = {"strategy": STRATEGIES, "fitted_on": ("prose", "code", "dialogue", "")}
    config.grid = ConfigDict({"model": ("smollm2-135m",), "keep": ("128+4",), **grid})
    return config
