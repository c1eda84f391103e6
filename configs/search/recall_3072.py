"""Recall among 100,000 vectors of 3,072 dimensions, as many as TurboQuant's Figure 5 has: synthetic, one draw.

Claim (TurboQuant): `turboquant` finds more than PQ and RaBitQ with the same bits. It does not: at 2 bits it finds 0.63
of the nearest, PQ 0.64, RaBitQ 0.76. Trellis codes find 0.78. The paper's vectors are embeddings of DBpedia's texts by
OpenAI's third model, which no package has; these are clusters about a mean (`samples.clustered`).

    python -m experiments.run --config=configs/search/recall_3072.py

Seconds to index as many are in `configs/search/indexing_time.py`. Takes 8 GB, and 35 minutes, most of them FAISS's
RaBitQ. Needs the extra `bench`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "recall",
            "n": 100_000,
            "queries": 1000,
            "seeds": 1,
            "grid": {
                "vectors": ("clustered, d = 3072",),
                "bits": (2, 4),
                "codec": ("turboquant", "turboquant_trellis", "faiss_rabitq", "faiss_pq"),
            },
        }
    )
