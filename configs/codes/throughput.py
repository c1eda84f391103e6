"""Speed on a CPU, as ratios in one run: encoding against FAISS's SQ4, a memcpy of the input and dense turboquant.

Claim (RotorQuant, Tables 2 and 3, on GPUs): 10 to 31 times faster than the dense rotation at d = 128. On two CPU cores
the dense product is near its peak and the rotor near the memory's. The ratio is 4 to 5 at d = 128 and grows with d.

    python -m experiments.run --config=configs/codes/throughput.py

Needs the extra `bench` (faiss-cpu). Expected of rotorquant at 1 to 4 bits: 2.5 to 3x SQ4, 0.8 to 1x memcpy. It is 4 to
4.7x turboquant at d = 128, 19 to 26x at d = 1024. Six minutes on two cores; nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "throughput",
            "coordinates": 2**23,
            "rounds": 11,
            "grid": {
                "dim": (128, 256, 512, 1024, 4096),
                "bits": (1, 2, 3, 4),
                "method": ("rotorquant", "rotorquant:bfloat16", "isoquant", "hadamard", "rotor_chain", "identity"),
            },
        }
    )
