"""OPQ beside product quantization and this library's codes of the same bytes: recall as in `configs/search/recall.py`.

Claim: trellis codes, which learn nothing or principal axes alone, find more than OPQ's learned rotation and centroids,
and than FAISS's local-search quantizer.

    python -m experiments.run --config=configs/search/recall_opq.py

OPQ takes two to four minutes a seed, half an hour in all, the local search as long; nothing else here does.
"""

from ml_collections import ConfigDict

from configs.search import recall


def get_config() -> ConfigDict:
    config = recall.get_config()
    codecs = ("turboquant_trellis:unit", "klt_trellis:tight", "faiss_rabitq", "faiss_pq", "faiss_opq", "faiss_lsq")
    config.update({"grid": {"vectors": ("clustered, d = 128",), "codec": codecs}})
    return config
