"""Queries a second for the ten nearest of 100,000 vectors, beside FAISS's RaBitQ and PQ, FastScan and not.

To see: a thousand queries together run three to ten times as fast as in RaBitQ (FastScan) and five to fifteen times as
fast as in IndexPQ. They have 0.3 to 0.4 of FastScan's speed (PQ) at 2 bits and 0.7 at 4. An older EPYC had 0.55 and
1.03 to 1.05. turbovec is two to three times as fast. For seconds at a time products in bfloat16 take half as long again
here and FAISS's do not: in one row of 2 bits. A single query of level codes takes two thirds to three quarters of
RaBitQ's time and seven to ten times FastScan's. A single query of trellis codes takes three to five times RaBitQ's.

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
