"""One query at a time among a million vectors, beside FAISS's RaBitQ and PQ.

    python -m experiments.run --config=configs/search/search_throughput_million.py

As `configs/search/search_throughput.py`. Needs the extra `bench`.
"""

from ml_collections import ConfigDict

from configs.search import search_throughput


def get_config() -> ConfigDict:
    config = search_throughput.get_config()
    config.n = 1_000_000
    config.grid = {
        "bits": (2, 4),
        "batch": (1,),
        "codec": ("eden_unbiased", "turboquant_trellis", "faiss_tqmse", "faiss_fastscan", "turbovec"),
    }
    return config
