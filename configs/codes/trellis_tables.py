"""Levels for trellis-coded quantization, trained on Gaussian numbers, and their errors.

    python -m experiments.run --config=configs/codes/trellis_tables.py

The grid has the levels of 2^8 states, which recipes use, from 1 to 4 bits, and at 2 bits those of 2^6 to 2^12. It
takes half an hour on two cores. All levels that rqjax has take an hour and a half:

    python -m experiments.run --config=configs/codes/trellis_tables.py:all --workdir=runs/trellis_tables
    cp runs/trellis_tables/trellis_tables.npz rqjax/codebooks/

`mse` is of a table with a level for each state as it would be stored, up to 4 bits in int8, above in float32; `float32`
is before its levels were rounded. `companded` is of levels by arithmetic, which are what is stored for 2^8 states.
`lloyd_max` is of as many bits for each coordinate alone. Fractional bits are whole ones in turns, each with a table of
its own; of `lloyd_max` they are the mean.
"""

from ml_collections import ConfigDict

from rqjax.codebooks.trellis_tables import STATE_BITS


def get_config(which: str = "") -> ConfigDict:
    every = sorted((bits, size) for bits, (least, most) in STATE_BITS.items() for size in range(least, most + 1))
    some = [(bits, size) for bits, size in every if bits == 2 or (size == 8 and 1 <= bits <= 4)]
    return ConfigDict(
        {
            "experiment": "trellis_tables",
            "dim": 128,
            "n": 2048,
            "steps": 300,
            "hops": 300,
            "grid": {"table": tuple(every if which == "all" else some)},
        }
    )
