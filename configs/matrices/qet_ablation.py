"""QET, figure 5: what rounded codebooks (CQO) and residuals (RQO) bring.

Claim, on Llama-2's weights at ratio 4: rounded codebooks leave 40.08 % of vanilla's error, residuals 16.23 %. The
second does not come out here: residuals leave 53 %, and 19.5 % of PQ's error.

    python -m experiments.run --config=configs/matrices/qet_ablation.py
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
                "ratio": (2, 4, 8, 12, 16),
                "method": ("pq", "qet_vanilla", "qet_cqo", "qet_rqo", "qet"),
            },
        }
    )
