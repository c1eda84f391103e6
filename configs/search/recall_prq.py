"""FAISS's residual quantizers beside product quantization and this library's codes of the same bytes.

Claim: `faiss_rq`, of whole vectors, finds more on all three data sets. The reason is its centroids: trained on these
very vectors, they take 1.6 to 5 times the bytes of these in float32 (`shared_bytes`). So it finds more even where there
is nothing to learn about other vectors (`sphere`). In clusters `klt_trellis:tight` finds more at 2 bits than
`faiss_prq`, of parts of the coordinates, and as many at 4.

    python -m experiments.run --config=configs/search/recall_prq.py

Recall as in `configs/search/recall.py`. An hour on two cores, most of it `faiss_rq`.
"""

from ml_collections import ConfigDict

from configs.search import recall


def get_config() -> ConfigDict:
    config = recall.get_config()
    codecs = (
        *("turboquant_trellis:unit", "klt_trellis:tight", "klt_trellis", "faiss_pq", "faiss_prq", "faiss_rq"),
        *("turboquant", "turboquant_trellis", "turbovec", "faiss_rabitq"),
    )
    vectors = ("words, d = 200", "clustered, d = 128", "sphere, d = 128")
    config.update({"grid": {"vectors": vectors, "codec": codecs}})
    return config
