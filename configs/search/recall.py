"""Recall of nearest neighbors by inner product at 2 and 4 bits (TurboQuant, Figure 5): this library and its peers.

Claim: with the bytes of any other codec, or fewer, trellis codes find the nearest vector at least as often, on all data
sets. They find at least as many of the ten nearest. `turboquant` finds what FAISS's TurboQuant, `faiss_tqmse`, does,
and more in clusters, from which an index subtracts the mean.
FAISS's residual quantizer finds more: `configs/search/recall_real.py`.

    python -m experiments.run --config=configs/search/recall.py

All vectors are unit vectors; `bytes` are those of codes, factors and norms of a vector, without ids, `shared_bytes`
those of all centroids, rotations and tables. ":tight" gives as many bits less as the scale takes, ":unit" stores no
scale. Needs the extra `bench`. More than half of its time is FAISS's PQ.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "recall",
            "n": 10_000,
            "queries": 1000,
            "seeds": 3,
            "grid": {
                "vectors": (
                    "words, d = 200",
                    "clustered, d = 128",
                    "sphere, d = 128",
                    "clustered, d = 1536",
                ),
                "bits": (2, 4),
                "codec": (
                    "turboquant",
                    "eden_unbiased",
                    "turboquant_trellis",
                    "turboquant_trellis:unit",
                    "klt_trellis:tight",
                    "turbovec",
                    "faiss_rabitq",
                    "faiss_tqmse",
                    "faiss_pq",
                ),
            },
        }
    )
