"""The leaderboard's methods with keys alone in codes, and with values alone.

Claim (KIVI, KVarN, llama.cpp): keys need more bits than values. It holds for all of them, 3 to 20 times, and for codes
of keys before rotary positions, too. Values without bias lose half as much, which is lost beside what keys lose.

    python -m experiments.run --config=configs/language/leaderboard_parts.py

`a/bfloat16` has codes of keys and exact values, `bfloat16/a` codes of values and exact keys; `bits` is the mean of
both. Rows with both sides in codes are those of `configs/language/leaderboard.py`, whose setting this is.
Needs the extra `real`.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard

STRATEGIES = (
    *("q4_0", "kivi_2", "kvarn_2", "eden_3", "eden_2", "nested_e8_2", "turboquant_trellis_2", "eden_unbiased_2"),
    *("klt_trellis_2", "klt_trellis_2+pre_rope"),
)
MIXED = ("eden_2/eden_unbiased_2", "turboquant_trellis_2/turboquant_trellis_unbiased_2")
"""Keys of least error and values without bias."""


def parts(name: str) -> list[str]:
    """Names a strategy with exact values, and with exact keys, to which its options do nothing."""
    base, *options = name.split("+")
    return ["+".join([f"{base}/bfloat16", *options]), f"bfloat16/{base}"]


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    strategies = dict.fromkeys(part for name in STRATEGIES for part in parts(name))  # +pre_rope has the values without
    config.update({"grid": {"keep": ("128+4",), "strategy": ("bfloat16", *strategies, *MIXED)}})
    return config
