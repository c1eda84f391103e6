"""Bias, error and correlation of estimated inner products of real embeddings: WordLlama's, and a sentence encoder's.

Claim: as on the sphere (`configs/codes/inner_product.py`), EDEN's unbiased scale has less error than a sketch, and a
trellis code less than that. Where vectors have a mean in common, shrinking codes shift all inner products down.

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
                "bits": (1, 2, 3, 4),
                "method": (
                    "turboquant",
                    "turboquant_prod",
                    "turboquant_prod_orthogonal",
                    "eden_unbiased",
                    "turboquant_trellis",
                    "turboquant_trellis_unbiased",
                ),
                "data": ("wordllama", "passages"),
            },
        }
    )
