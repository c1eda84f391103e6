"""Needles in text (RULER's tasks, Hsieh et al., 2024) for SmolLM2-135M: what it still finds through a compressed cache.

Claim (TurboQuant, RotorQuant): needles are found as well as in full precision, down to 2 bits.

    python -m experiments.run --config=configs/language/ruler_text.py

A number is asked for that a line among 1,024 tokens of prose, code and dialogue tells; that one of many such lines
tells; or four, one after the other. The model answers none of the other tasks of `configs/language/ruler.py` in
float32, so they are left out. The newest 128 tokens and the first 4 are exact, and prompts are read in pieces of 128.
"""

from ml_collections import ConfigDict

from configs.language import ruler


def get_config() -> ConfigDict:
    config = ruler.get_config()
    two_bits = ("eden_2", "turboquant_trellis_2", "kivi_2", "klt_trellis_2+pre_rope", "v3_2", "rotorquant_2")
    grid = {"model": ("smollm2-135m",), "keep": ("128+4",), "tokens": (1024,)}
    grid["strategy"] = ("float32", "eden_4", *two_bits, "rotorquant_4")
    config.update({"tasks": ("niah_single", "niah_multikey", "niah_multiquery"), "corpus": "mixed"})
    config.update({"examples": 3, "seeds": 4, "chunk": 128, "grid": grid})
    return config
