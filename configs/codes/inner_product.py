"""RotorQuant's Table 5, TurboQuant's Figures 1 and 2: bias, error and correlation of estimated inner products.

Claim: mse-optimal quantizers shrink inner products by 1 - D, sketched residuals by nothing. An orthogonal sketch has
0.6 of the Gaussian one's error, and EDEN's unbiased scale beats both with no sketch at all.

To see: the slope, the factor on every inner product, is 1 within one percent for all `_prod` and `_unbiased`.
`turboquant` shrinks inner products, at 3 bits to 0.97. `turboquant_trellis_unbiased` has the smallest RMSE of the
methods that do not shrink.

    python -m experiments.run --config=configs/codes/inner_product.py

Expected at 3 and 4 bits: RMSE 0.037 and 0.020, correlation 0.918 and 0.974 for turboquant_prod; 0.048 and 0.031,
0.878 and 0.943 for rotorquant_paper_prod, whose codebook has the wrong scale.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "inner_product",
            "n": 3000,
            "seeds": 5,
            "grid": {
                "dim": (128,),
                "bits": (1, 2, 3, 4),
                "method": (
                    "turboquant",
                    "turboquant_prod",
                    "turboquant_prod_orthogonal",
                    "rotorquant_prod",
                    "rotorquant_paper_prod",
                    "eden_unbiased",
                    "turboquant_trellis_unbiased",
                ),
                "data": ("sphere",),
            },
        }
    )
