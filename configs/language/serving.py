"""Continuous batching over pages: 64 prompts of 2,048 to 6,144 tokens that begin alike, answers of 64 tokens.

Claim (issues of serving engines): a quantized cache holds more texts at a time, and so makes more tokens a second, if
its prefixes can still be shared. The cache has the bytes of four of the longest texts in bfloat16.

To see: the number of pages follows the bits, but tokens a second do not. On a CPU, reading prompts takes nearly all of
the time, one piece of one prompt a step. Few texts are therefore written at a time, however many pages there are. A
prompt with a known beginning has its first token three to five times sooner.

    python -m experiments.run --config=configs/language/serving.py

Nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "serving",
            "requests": 64,
            "shared": 2048,
            "own": 4096,
            "answer": 64,
            "held": 4,
            "slots": 24,
            "grid": {
                "model": ("llama-d128",),
                "strategy": ("bfloat16", "eden_4", "turboquant_trellis_3", "turboquant_trellis_2"),
            },
        }
    )
