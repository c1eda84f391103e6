"""Levels for trellis-coded quantization, trained on Gaussian numbers, and their errors.

    python -m experiments.run --config=configs/codes/trellis_tables.py --workdir=runs/trellis_tables
    cp runs/trellis_tables/trellis_tables.npz rqjax/codebooks/

`mse` is of a table with a level for each state as it would be stored, up to 4 bits in int8, above in float32; `float32`
is before its levels were rounded. `companded` is of levels by arithmetic, which are what is stored for 2^8 states.
`lloyd_max` is of as many bits for each coordinate alone. Fractional bits are whole ones in turns, each with a table of
its own; of `lloyd_max` they are the mean. Two hours on two cores.
"""

from ml_collections import ConfigDict

from rqjax.codebooks.trellis_tables import STATE_BITS


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "trellis_tables",
            "dim": 128,
            "n": 2048,
            "steps": 300,
            "hops": 300,
            "grid": {
                "table": tuple(
                    (bits, size) for bits, (least, most) in STATE_BITS.items() for size in range(least, most + 1)
                )
            },
        }
    )
