"""The leaderboard's methods on synthetic keys with the outlier channels and turning biases that large models have.

Claims: small models have neither, so that their table is too kind to codes that learn nothing (issue 21385 of
llama.cpp: Qwen 2 and 2.5 break in quantized caches); scales of channels (KIVI, KVarN) are for just that.

    python -m experiments.run --config=configs/caches/leaderboard_bias.py

The biases are those of `configs/caches/turning_bias.py`, with the norms of Qwen2.5-7B's first and last layer, 605 and
921. Four channels of each head are ten times as loud as the others; without a bias a key's norm is then 23. Keys alone
are in codes, all but those that wait for the other tokens of a tile.
"""

from ml_collections import ConfigDict

from configs.caches import turning_bias

THEIRS = (
    "q8_0",
    "q4_0",
    "nvfp4",
    "hadamard_int4",
    "kivi_4",
    "kivi_2",
    "kvarn_4",
    "kvarn_2",
    "oscar_2",
    "v3_4",
)
OURS = (
    *("eden_4", "eden_3", "eden_2", "nested_e8_4", "nested_e8_2"),
    *("turboquant_trellis_4", "turboquant_trellis_3", "turboquant_trellis_2"),
    *("eden_4+turned", "eden_2+turned", "nested_e8_4+turned"),
    *("turboquant_trellis_4+turned", "turboquant_trellis_3+turned", "turboquant_trellis_2+turned"),
    *("klt_trellis_2", "klt_trellis_2+pre_rope"),
)


def get_config() -> ConfigDict:
    config = turning_bias.get_config()
    config.update(
        {"loud": 10, "seeds": 2, "grid": {"norm": (605, 921), "tokens": (4096,), "strategy": (*THEIRS, *OURS)}}
    )
    return config
