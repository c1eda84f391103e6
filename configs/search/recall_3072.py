"""Recall among 100,000 vectors of 3,072 dimensions, as many as TurboQuant's Figure 5 has: synthetic, one draw.

Claim: `turboquant` finds more than PQ and RaBitQ with the same bits. The paper's vectors are embeddings of DBpedia's
texts by OpenAI's third model, which no package has; these are clusters about a mean (`samples.clustered`).

    python -m experiments.run --config=configs/search/recall_3072.py

Seconds to index as many are in `configs/search/indexing_time.py`. Takes 8 GB, and 50 minutes, of which half are FAISS's
PQ. Needs the extra `bench`.
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
