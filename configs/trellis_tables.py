"""Levels for trellis-coded quantization, trained on Gaussian numbers, and their errors.

    python -m experiments.run --config=configs/trellis_tables.py --workdir=runs/trellis_tables
    cp runs/trellis_tables/trellis_tables.npz rqjax/codebooks/

`mse` is of a level for each state as it is stored, up to 4 bits in int8, above in float32; `float32` is before they
were rounded. `summed` is of levels that are sums of two look-ups among 16: they are what is stored for 2^8 states up to
4 bits. `computed` is of arithmetic on the state in the place of a table, `lloyd_max` of as many bits for each
coordinate alone. Half an hour on two cores.
"""

import itertools

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "trellis_tables",
            "dim": 128,
            "n": 2048,
            "steps": 300,
            "hops": 1000,
            "grid": {"table": (*itertools.product((1, 2, 3, 4), range(6, 13)), *((bits, 8) for bits in (5, 6, 7, 8)))},
        }
    )
