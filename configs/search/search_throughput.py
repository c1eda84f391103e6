"""Queries a second for the ten nearest of 100,000 vectors, beside FAISS's IndexRaBitQ, IndexPQ and IndexPQFastScan.

To see: a thousand queries together run five to ten times as fast as in IndexRaBitQ and six to twelve times as fast as
in IndexPQ. They run half as fast as in FastScan at 2 bits and as fast at 4; turbovec is twice as fast. A single query
of level codes takes half of IndexRaBitQ's time and four to six times FastScan's. A single query of trellis codes takes
two to three times IndexRaBitQ's.

    python -m experiments.run --config=configs/search/search_throughput.py

All take turns in one process. Needs the extra `bench`, and the machine to itself.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "search_throughput",
            "n": 100_000,
            "rounds": 3,
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
