"""Recall on real embeddings: those of WordLlama's tokens, and a sentence encoder's of passages of text.

Claim: FAISS's residual quantizer finds the most, with centroids of many times the bytes of the vectors
(`shared_bytes`). With few bytes shared, `klt_trellis:tight` finds at least as many as PQ, OPQ and RaBitQ.

    python -m experiments.run --config=configs/search/recall_real.py

Recall as in `configs/search/recall.py`. Nearest by inner product, cosine or distance are the same, since all vectors
are unit vectors: ":centered" subtracts their mean before the codes, ":l2" also ranks by distance, as `Index` does for
the metric "l2". `faiss_rabitq` and `faiss_eden` subtract the mean, too. `passages` are 384 numbers of all-MiniLM-L6-v2,
with the mean that they have in common, and 9,510 of them are searched. Needs the extras `bench` and `real`.
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
                "vectors": ("wordllama, d = 256", "passages, d = 384"),
                "bits": (2, 4, 1),
                "codec": (
                    "eden_unbiased",
                    "eden_unbiased:l2",
                    "turboquant_trellis:unit",
                    "klt_trellis:tight",
                    "faiss_rabitq",
                    "faiss_eden",
                    "faiss_pq",
                    "faiss_rq",
                ),
            },
        }
    )
