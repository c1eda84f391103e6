"""Memory of an index of a million vectors.

Claim: a million vectors of 128 dimensions at 4 bits are indexed and searched in under 4 GB, the vectors included.
It holds for codes without data, 1.2 and 1.9 GiB. `klt_trellis`, fitted to all vectors at once, takes 6.3.

    python -m experiments.run --config=configs/search/search_memory.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "indexing_time",
            "n": 1_000_000,
            "bits": 4,
            "enough": 0.0,
            "memory": True,
            "grid": {"dim": (128,), "codec": ("turboquant", "turboquant_trellis", "klt_trellis")},
        }
    )
