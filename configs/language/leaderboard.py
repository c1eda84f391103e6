"""All methods beside each other at equal stored bits: what a pretrained decoder loses through a compressed cache.

Claim: with the default window (128 newest and 4 first tokens exact) `klt_joint` has the least divergence at 2, 3 and 4
bits. It is learned from text: a transform code of all heads together, of keys before rotary positions, relative to
their mean. Of codes that learn nothing, trellis and nested lattice codes have the least at 2 and 3 bits; at 4 `kvarn_4`
and `kivi_4` lose less, with more tokens exact.

    python -m experiments.run --config=configs/language/leaderboard.py
    python -m experiments.run --config=configs/language/leaderboard.py --config.grid.model="('FOLDER_OF_A_CHECKPOINT',)"

The model is SmolLM2-135M-Instruct with weights of 4 bits (extra `real`), 8 windows of 1,024 tokens: two each of prose,
code, dialogue and Python's library (`experiments/corpus`). What learns is fitted to 8,192 other tokens of these four.
Keep `0+4` has the first four tokens exact and is for comparison alone: nobody runs a model so. A chunk of 16 tokens
sees itself in full precision. Each seed's rotations serve half of the windows. Stored bits are of real arrays, scales
and means included; KIVI's 32 and KVarN's 128 tokens that share scales are exact until they are complete, which is not
in their bits. Four hours of two cores. Codes of `configs/language/toys.py` are the same on models without rank.
"""

from ml_collections import ConfigDict

FORMATS = ("float8", "q8_0", "q4_0", "nvfp4", "mxfp4", "hadamard_int4", "kivi_4", "kivi_2")
TILES = ("kvarn_4", "kvarn_2")
PEERS = ("v2_lean", "v3_4", "v3_3", "v3_2", "rotorquant_4", "rotorquant_3")
WITHOUT_DATA = (
    *("eden_4", "eden_3", "eden_2", "nested_e8_4", "nested_e8_3", "nested_e8_2"),
    *("turboquant_trellis_4", "turboquant_trellis_3", "turboquant_trellis_2.5", "turboquant_trellis_2"),
    *("turboquant_trellis_1.5", "turboquant_trellis_1"),
    *("eden_3+turned", "eden_2+turned", "turboquant_trellis_2+turned"),
)
LEARNED = (
    *("oscar_2", "klt_trellis_2"),
    *("klt_trellis_3+pre_rope", "klt_trellis_2+pre_rope", "klt_trellis_1/klt_trellis_2+pre_rope"),
    *("klt_trellis_4+pre_rope", "klt_trellis_3+centered+pre_rope", "klt_trellis_2+centered+pre_rope"),
    *("klt_joint_4.167+centered+pre_rope", "klt_joint_3.167+centered+pre_rope", "klt_joint_2.167+centered+pre_rope"),
)


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "perplexity",
            "corpus": "mixed",
            "fitted_on": "mixed",
            "context": 1024,
            "windows": 8,
            "chunk": 16,
            "seeds": 2,
            "grid": {
                "model": ("smollm2-135m",),
                "keep": ("128+4", "0+4"),
                "strategy": ("bfloat16", *WITHOUT_DATA, *PEERS, *FORMATS, *TILES, *LEARNED),
            },
        }
    )
