"""QET on matrices that are not synthetic: Gaussian weights of Llama-2's shape, word vectors, a model's keys and values.

Claim, at ratio 4 on Llama-2's weights, keys and values: vanilla leaves 36.64, 50.24 and 45.83 % of PQ's error, QET
5.05, 13.33 and 11.89 %. The keys and values here are of a decoder of this repository, whose channels differ less.

    python -m experiments.run --config=configs/matrices/qet_matrices.py
    python -m experiments.run --config=configs/matrices/qet_matrices.py --config.scale=1 \\
        --config.grid.data="('file:model.safetensors#model.layers.0.mlp.up_proj.weight',)"

`scale` divides the number of rows (of `gaussian_weights` of columns, too).
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "matrix_budget",
            "seeds": 5,
            "scale": 4,
            "grid": {
                "data": ("gaussian_weights", "words", "keys", "values"),
                "ratio": (2, 4, 8, 12, 16),
                "method": ("rtn", "pq", "qet_vanilla", "qet_cqo", "qet_rqo", "qet", "qet_best"),
            },
        }
    )
