"""Codes of the latents of multi-head latent attention: what a decoder of DeepSeek V2's form loses through them.

The decoder was trained by `configs/language/train_lm.py`: latents of 128 coordinates and 32 that turn. A strategy "a/b"
has the coordinates that turn in codes of a and the latent in codes of b. All tokens but those of the piece of 64 that
is read are in codes, the first ones too.

    python -m experiments.run --config=configs/language/latent_perplexity.py --workdir=results/latent_perplexity
"""

from ml_collections import ConfigDict

from configs.language import toys


def get_config() -> ConfigDict:
    config = toys.get_config()
    random = ("identity_{}", "rotor_chain_{}", "eden_{}", "turboquant_trellis_{}", "eden_{}+turned", "eden_8/eden_{}")
    fitted = ("klt_trellis_{}", "klt_trellis_{}+pre_rope", "eden_8/klt_trellis_{}")
    strategies = [name.format(bits) for bits in (4, 3, 2) for name in (*random, *(fitted if bits < 4 else ()))]
    grid = {"model": ("deepseek-r128",), "keep": ("0+0",), "strategy": tuple(strategies)}
    config.update({"chunk": 64, "windows": 16, "seeds": 2, "grid": grid})
    return config
