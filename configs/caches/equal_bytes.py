"""Bytes of whole caches that lose different amounts: what equal bytes buy, quantizers and exact tokens counted.

Claim: transform codes bring their matrices along. With a thousand tokens those of single heads are as large as plain
codes of twice the bits, those of all heads larger than 8 bits. With eight thousand the matrices are 9 to 37 % of the
bytes, with 32 thousand 3 to 14 %.

    python -m experiments.run --config=configs/caches/equal_bytes.py

What each strategy loses is in `configs/language/leaderboard.py`. A cache has a slot more than `context`. All sequences
of a batch share the quantizers.
"""

from ml_collections import ConfigDict

STRATEGIES = (
    *("float16", "q8_0", "eden_4", "turboquant_trellis_3", "turboquant_trellis_2.5", "turboquant_trellis_2"),
    *("nested_e8_2", "kvarn_2", "klt_trellis_2+pre_rope", "klt_joint_2.167+centered+pre_rope"),
)


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "kv_memory",
            "grid": {
                "context": (1023, 8191, 32767),
                "model": ("SmolLM2 135M", "Llama 3.2 3B"),
                "strategy": STRATEGIES,
            },
        }
    )
