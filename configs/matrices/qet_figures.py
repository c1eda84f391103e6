"""QET, figures 3 and 4: error and time of all methods at compression ratios from 2 to 16.

Claim: at ratio 4 QET has 7 % of PQ's mean squared error on the synthetic matrices, without its optimizations 36.5 %.

    python -m experiments.run --config=configs/matrices/qet_figures.py

A method that does not fit into the bytes says so in the table.
"""

from ml_collections import ConfigDict

RATIOS = tuple(range(2, 17))


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "matrix_budget",
            "seeds": 3,
            "scale": 1,
            "mean_over": RATIOS,
            "grid": {
                "data": ("synthetic_1", "synthetic_2", "synthetic_3"),
                "ratio": RATIOS,
                "method": ("rtn", "pq", "opq", "lopq", "qet_vanilla", "qet", "qet_best"),
            },
        }
    )
