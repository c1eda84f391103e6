"""Perplexity through compressed caches: TurboQuant MLX's "Multi-Model Quality", with its figures beside ours.

Claims: 4 bits within 1 % to 4 % of 16 bits, 3.5 bits mixed within 7 %; QJL helps as extra bits (v2_rotated_qjl against
affine_rotated_3) and hurts in the place of a bit (turboquant_prod_3 against v3_3).

    python -m experiments.run --config=configs/language/perplexity.py

The published changes are of four models of 3 to 8 billion parameters, each with weights of 4 bits and all tokens in
codes, so `keep` is 0+4 here. The setting is that of `configs/language/leaderboard.py`. Needs the extra `real`.
"""

from ml_collections import ConfigDict

from configs.language import leaderboard


def get_config() -> ConfigDict:
    config = leaderboard.get_config()
    with config.unlocked():
        config.published = True
    strategies = (
        *("v2_lean", "v2_rotated", "affine_rotated_3", "v2_rotated_qjl", "v2_rotated_qjl_orthogonal"),
        *("v3_4", "v3_3.5", "v3_3.25", "v3_3", "turboquant_prod_3", "v3_2.75", "v3_2.5", "v3_2"),
    )
    config.update({"grid": {"keep": ("0+4",), "strategy": strategies}})
    return config
