"""Queries a second for the ten nearest of 100,000 vectors, beside FAISS's IndexRaBitQ, IndexPQ and IndexPQFastScan.

Claim: level codes answer one query as fast as any FAISS codec of as many bits but PQ in registers (FastScan), and all
codes more queries than any where many come together.

    python -m experiments.run --config=configs/search_throughput.py

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
