"""Attention of one token from caches of the leaderboard's strategies, against plain float32 and bfloat16 caches.

Claim: formats of blocks, grids of channels and tiles decode as fast as plain codes. Expected: what caches multiply as
whole numbers is as fast as bfloat16 or faster, what they decode first is slower.

    python -m experiments.run --config=configs/caches/leaderboard_throughput.py

As `configs/caches/kv_throughput.py`, at 8,192 tokens alone. A quarter of an hour.

To see: codes that are decoded first are slower than a plain cache, and so are lattice codes, which are not. KIVI,
`q4_0` and lattice codes have half of its speed, KVarN a third. Number formats except `q4_0`, and keys before they turn,
have a fourth to an eighth.
"""

from ml_collections import ConfigDict

from configs.caches import kv_throughput

THEIRS = (
    "bfloat16",
    "float8",
    "q8_0",
    "q4_0",
    "nvfp4",
    "hadamard_int4",
    "kivi_2",
    "kvarn_2",
    "v3_3",
    "v3_2",
    "rotorquant_3",
    "oscar_2",
)
OURS = (
    *("eden_3", "eden_2", "eden_3+turned", "nested_e8_3", "turboquant_trellis_3"),
    *("klt_trellis_2", "klt_trellis_2+pre_rope", "klt_joint_2+centered+pre_rope"),
)


def get_config() -> ConfigDict:
    config = kv_throughput.get_config()
    config.grid = {"shape": ("3x8192",), "strategy": (*THEIRS, *OURS)}
    return config
