"""FAISS's product residual quantizer beside product quantization and this library's codes of the same bytes.

Claim: its codes find more of ten thousand words and random directions, because its centroids, trained on these very
vectors, take 0.8 to 2.6 times the bytes of these in float32 (`shared_bytes`): so it is where there is nothing to learn
about other vectors (`sphere`). In clusters, where there is, `klt_trellis:tight` finds more at 2 bits and as many at 4.

    python -m experiments.run --config=configs/recall_prq.py

Recall as in `configs/recall.py`. Twenty minutes on two cores.
"""

from ml_collections import ConfigDict

from configs import recall


def get_config() -> ConfigDict:
    config = recall.get_config()
    codecs = ("turboquant_trellis:unit", "klt_trellis:tight", "klt_trellis", "faiss_pq", "faiss_prq")
    vectors = ("words, d = 200", "clustered, d = 128", "sphere, d = 128")
    config.update({"grid": {"vectors": vectors, "codec": codecs}})
    return config
