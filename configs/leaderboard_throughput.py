"""Attention of one token from caches of the leaderboard's strategies, against plain float32 and bfloat16 caches.

Claim: formats of blocks, grids of channels and tiles decode as fast as plain codes. Expected: what caches multiply as
whole numbers is as fast as bfloat16 or faster, what they decode first is slower.

    python -m experiments.run --config=configs/leaderboard_throughput.py

As `configs/kv_throughput.py`, at 8,192 tokens alone. A quarter of an hour.
"""

from ml_collections import ConfigDict

from configs import kv_throughput, leaderboard

LEARNED = ("oscar_2", "klt_trellis_2", "klt_trellis_3+pre_rope", "klt_trellis_2+pre_rope")


def get_config() -> ConfigDict:
    config = kv_throughput.get_config()
    known = (*leaderboard.FORMATS, *leaderboard.TILES, *leaderboard.PEERS, *leaderboard.WITHOUT_DATA)
    config.grid = {"shape": ("3x8192",), "strategy": ("bfloat16", *known, *LEARNED)}
    return config
