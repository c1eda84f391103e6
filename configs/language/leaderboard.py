"""All methods beside each other at equal stored bits: what language models lose through a cache that is all codes.

Claims: from 1.5 to 8 bits the least divergence, mean and 99.9 %, is that of a transform code of keys before rotary
positions. This code, `klt_trellis` with "+pre_rope", is learned from text. Of codes that learn nothing, trellis and
nested lattice codes have the least. Tiles whose newest tokens are exact (`kvarn`) have a lower median.

    python -m experiments.run --config=configs/language/leaderboard.py
    python -m experiments.run --config=configs/language/leaderboard.py --config.grid.model="('FOLDER_OF_A_CHECKPOINT',)"

Stored bits are of real arrays, scales included, means of keys and values. No token is in full precision but the newest
15 at most (`keep` 0+0), 31 of KIVI and 127 of KVarN, whose scales are shared by 32 and 128 tokens. On average it is
half of that, which is not in their bits. The windows are those of `configs/language/perplexity.py`. Hours of one core.
"""

from ml_collections import ConfigDict

from configs.language import perplexity

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
)


def get_config() -> ConfigDict:
    config = perplexity.get_config()
    config.update({"chunk": 64, "grid": {"strategy": (*FORMATS, *TILES, *PEERS, *WITHOUT_DATA, *LEARNED)}})
    return config
