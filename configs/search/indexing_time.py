"""Seconds to index 100,000 vectors at 4 bits (TurboQuant, Table 2).

Claim: at 1536 dimensions an index of `rotorquant` codes is there 44 times sooner than FAISS's PQ trained and filled, on
the same cores, and 260 times sooner without compiling. From there on one of any codes but the learned ones is there
sooner than FAISS's RaBitQ. At 200 dimensions the first index of dense rotations is not, as it takes longer to compile.

    python -m experiments.run --config=configs/search/indexing_time.py

The published seconds are of other machines, those of TurboQuant of a GPU. Needs the extra `bench`, and the machine to
itself.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "indexing_time",
            "n": 100_000,
            "bits": 4,
            "enough": 30.0,
            "grid": {
                "dim": (200, 1536, 3072),
                "codec": (
                    "turboquant",
                    "rotorquant",
                    "hadamard",
                    "rotor_chain",
                    "turboquant_trellis",
                    "klt_trellis",
                    "turbovec",
                    "faiss_rabitq",
                    "faiss_pq",
                ),
            },
        }
    )
