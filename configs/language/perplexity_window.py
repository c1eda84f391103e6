"""Perplexity through compressed caches that keep the newest 128 and the first 4 tokens in full precision, the default.

The rest is `configs/language/perplexity.py`: there nothing is kept but the newest 15 tokens at most.

    python -m experiments.run --config=configs/language/perplexity_window.py
"""

from ml_collections import ConfigDict

from configs.language import perplexity


def get_config() -> ConfigDict:
    config = perplexity.get_config()
    strategies = ("v2_lean", "v3_4", "v3_3.5", "v3_3", "v3_2.5", "v3_2", "eden_3", "turboquant_prod_3")
    config.update({"grid": {"keep": ("128+4",), "strategy": strategies}})
    return config
