"""Inverted files over a million clustered vectors, beside FAISS's IVFPQ FastScan and IVF RaBitQ, and its HNSW graph.

To see: ours find more than IVFPQ FastScan in about as many bytes, and as much as IVF RaBitQ, which takes 18 bytes more.
One list in 768 has 0.93 to 0.95 of what sixteen find, at a fourteenth to a twentieth of a scan's time. FAISS is faster:
RaBitQ answers 1.4 to 5.0 times as many queries together and 2.1 to 5.8 times as many one by one, FastScan four to
seventeen times. The graph takes three to six times the bytes.

    python -m experiments.run --config=configs/search/inverted_files.py

All take turns with the scan in one process. Needs the extra `bench`, 10 GiB, and the machine to itself.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "inverted_files",
            "n": 1_000_000,
            "dim": 128,
            "lists": 768,
            "rounds": 5,
            "grid": {
                "codec": (
                    "eden_unbiased_2",
                    "eden_unbiased_4",
                    "turboquant_trellis_4",
                    "faiss_ivfpq_fastscan_2",
                    "faiss_ivfpq_fastscan_4",
                    "faiss_ivf_rabitq_2",
                    "faiss_ivf_rabitq_4",
                    "faiss_hnsw_sq_4",
                    "faiss_hnsw_sq_8",
                ),
                "batch": (1, 1000),
                "probes": (1, 2, 4, 16),
            },
        }
    )
