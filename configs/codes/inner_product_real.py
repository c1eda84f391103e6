"""Bias, error and correlation of estimated inner products of real embeddings: WordLlama's, and a sentence encoder's.

Claim: where vectors have a mean in common, a scale without bias is worth more than least error. On the passages
`turboquant` shrinks all inner products towards 0. It has 2.1 times the RMSE of `eden_unbiased` at 1 bit and 1.6 times
at 2, though as high a correlation. On WordLlama's vectors, whose mean is small, it has 0.84 and 0.96 times that RMSE.

To see: `turboquant_trellis_unbiased` has the smallest RMSE of all on the passages. A sketch, `turboquant_prod`, has 1.7
times the RMSE of `eden_unbiased` at 1 bit and 2.1 times at 2. An orthogonal one has as much as `eden_unbiased` at 1 bit
and 1.2 to 1.3 times as much at 2.

    python -m experiments.run --config=configs/codes/inner_product_real.py

Unit vectors, with the mean that they have in common. Needs the extra `real`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "inner_product",
            "n": 3000,
            "seeds": 5,
            "dim": 0,
            "grid": {
                "bits": (1, 2),
                "method": (
                    "turboquant",
                    "turboquant_prod",
                    "turboquant_prod_orthogonal",
                    "eden_unbiased",
                    "turboquant_trellis_unbiased",
                ),
                "data": ("wordllama", "passages"),
            },
        }
    )
