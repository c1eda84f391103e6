"""QET, figure 4: seconds to quantize and to get back, at growing sizes, and FAISS's product quantizers beside ours.

Needs the extra `bench` (faiss-cpu); nothing else may run beside it.

    python -m experiments.run --config=configs/matrices/qet_throughput.py
    python -m experiments.run --config=configs/matrices/qet_throughput.py --config.grid.method="('opq',)" \\
        --config.grid.shape='((1024,256),)'

`opq` has 256 centroids, as FAISS has powers of two only; the others fill the bytes. FAISS takes minutes for OPQ of 1024
columns.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "matrix_throughput",
            "ratio": 4,
            "rounds": 3,
            "grid": {
                "shape": ((1024, 256), (1024, 1024), (4096, 256), (4096, 1024)),
                "method": ("rtn", "pq", "qet_vanilla", "qet", "qet_best"),
            },
        }
    )
