"""The best of QET's knobs at each ratio: levels of exchange, stages, split of memory, bits of codebooks, group width.

    python -m experiments.run --config=configs/matrices/qet_best.py

The winners, there and at ratios between, are `rqjax.budget.BEST`, what `qet_best` is made of. "l2w1c12": two levels of
exchange, groups of one coordinate, codebooks of 12 bits; "+" begins a stage for what is left over, "p" is a stage's
share. The paper's are "l3w8c10p0.7+w8c10p0.3".
"""

from ml_collections import ConfigDict

ONE = [
    f"l{levels}w{width}{bits}" for width in (1, 2, 4) for levels in (0, 1, 2, 3) for bits in ("", "c10", "c12", "c14")
]
TWO = [
    f"l{first}w{width}c12p{share}+l{second}w{width}c12p{round(1 - share, 1)}"
    for width in (1, 2)
    for first, second in ((0, 0), (1, 0), (1, 1))
    for share in (0.7, 0.9)
]


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "matrix_budget",
            "seeds": 2,
            "scale": 1,
            "grid": {
                "data": ("synthetic_1",),
                "ratio": (2, 4, 8, 12, 16),
                "method": ("qet", *ONE, *TWO),
            },
        }
    )
