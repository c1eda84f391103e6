"""QET, Table 1: the range of what quantization leaves over, and how much of the memory is codebook.

Claim: at ratios 4, 8 and 12 codebooks take 87.5, 78.1 and 71.8 %, and what is left has 1.6, 4.0 and 9.2 % of the
range. The shares are those of `pq` (1 - b r / 256 with indices of 8, 7 and 6 bits), whose budget no maps share.

To see: the shares of `pq` are the published ones, those of `qet_vanilla` are not. What is left over has 0.2 to 1.2 % of
the range, not 1.6 to 9.2 %.

    python -m experiments.run --config=configs/matrices/qet_table1.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "matrix_budget",
            "seeds": 5,
            "scale": 1,
            "grid": {
                "data": ("synthetic_1", "synthetic_2", "synthetic_3"),
                "ratio": (4, 8, 12),
                "method": ("pq", "qet_vanilla"),
            },
        }
    )
