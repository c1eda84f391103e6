"""Recall on real embeddings: those of WordLlama's tokens, and a sentence encoder's of passages of text.

Claim, at 2 bits: FAISS's residual quantizer finds the most, with centroids of 3.3 and 5.2 times the bytes of these
vectors (`shared_bytes`). Of codes that share little, `klt_trellis:tight` finds the most. On WordLlama's vectors that is
0.02 more than PQ, where on synthetic clusters it is 0.19 to 0.24. On the passages it is 0.06 more than RaBitQ, and 0.11
more than PQ.

    python -m experiments.run --config=configs/search/recall_real.py

The worst of ours is `eden_unbiased`: PQ finds 0.02 more of WordLlama's vectors in 2 bytes fewer, and RaBitQ 0.01 more
of the passages in 14 bytes more. Recall as in `configs/search/recall.py`; vectors are unit vectors. `passages` are 384
numbers of all-MiniLM-L6-v2, with the mean that they have in common, and 9,510 of them are searched. OPQ takes hours and
is left out (`faiss_opq`). Needs the extras `bench` and `real`.
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
                "bits": (2, 4),
                "codec": (
                    "eden_unbiased",
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
