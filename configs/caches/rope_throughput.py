"""Decode attention of caches that know rotary positions, against plain caches and the same codes without, in one run.

Claims: a mean that turns costs a tenth of the time, less than rows vary here. Codes of keys before they turn are
decoded and turned block by block, at 0.26 to 0.27 of a plain float32 cache's speed; of 1 bit, at 0.36 to 0.37.

    python -m experiments.run --config=configs/caches/rope_throughput.py

As `configs/caches/kv_throughput.py`; the transform codes of keys before they turn are fitted to those of the trained
decoder. Five minutes; nothing else may run beside it.
"""

from ml_collections import ConfigDict

from configs.caches import kv_throughput


def get_config() -> ConfigDict:
    config = kv_throughput.get_config()
    transform = ("klt_trellis_2", "klt_trellis_2+pre_rope", "klt_trellis_1+pre_rope")
    config.grid = {"shape": ("3x8192", "3x32768"), "strategy": ("eden_2", "eden_2+turned", *transform)}
    return config
