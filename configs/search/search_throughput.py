"""Queries a second for the ten nearest of 100,000 vectors, beside FAISS's IndexRaBitQ, IndexPQ and IndexPQFastScan.

To see: a thousand queries together are answered five to ten times as fast as by IndexRaBitQ and six to twelve times as
fast as by IndexPQ. They are answered half as fast as by FastScan at 2 bits and as fast at 4. Answers by turbovec are
twice as fast. One query alone takes, through level codes, half of IndexRaBitQ's time and four to six times that of
FastScan. Through trellis codes it takes two to three times that of IndexRaBitQ.

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
