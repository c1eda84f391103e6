"""Queries a second for the ten nearest of 100,000 vectors, beside FAISS's RaBitQ and PQ, FastScan and not.

To see: a thousand queries together run four to ten times as fast as in RaBitQ (FastScan) and seven to fifteen times as
fast as in IndexPQ. They have 0.4 of FastScan's speed (PQ) at 2 bits and 0.7 at 4. An older EPYC had 0.55 and 1.03 to
1.05. turbovec is 1.8 to 2.3 times as fast. For seconds at a time products in bfloat16 take half as long again here and
FAISS's do not, so that one row of another run had 0.27. A single query of level codes takes 0.6 to 0.8 of RaBitQ's time
and seven to eleven times FastScan's. A single query of trellis codes takes two to five times RaBitQ's.

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
