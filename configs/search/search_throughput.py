"""Queries a second for the ten nearest of 100,000 vectors, beside FAISS's RaBitQ and PQ, FastScan and not.

To see: a thousand queries together run three to eight times as fast as in RaBitQ (FastScan) and six to twelve times as
fast as in IndexPQ. They run half as fast as in PQ's FastScan at 2 bits and as fast at 4; turbovec is two to five times
as fast. For seconds at a time products in bfloat16 take twice their time here and FAISS does not: in two rows of 2
bits. A single query of level codes takes two thirds of RaBitQ's time and four to six times FastScan's. A single query
of trellis codes takes two to five times RaBitQ's.

    python -m experiments.run --config=configs/search/search_throughput.py

All take turns in one process. Needs the extra `bench`, and the machine to itself.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "search_throughput",
            "n": 100_000,
            "rounds": 9,
            "dim": 128,
            "grid": {
                "bits": (2, 4),
                "batch": (1, 1000),
                "codec": (
                    "turboquant",
                    "eden_unbiased",
                    "turboquant_trellis",
                    "klt_trellis",
                    "faiss_tqmse",
                    "faiss_rabitq",
                    "faiss_pq",
                    "faiss_fastscan",
                    "turbovec",
                ),
            },
        }
    )
