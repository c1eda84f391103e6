"""RULER-style long-context tasks (Hsieh et al., 2024): what a model still answers from a compressed cache.

Claim (TurboQuant, RotorQuant): needles are found as well as in full precision, down to 2 bits.

    python -m experiments.run --config=configs/language/ruler.py
    python -m experiments.run --config=configs/language/ruler.py --config.grid.model="('FOLDER',)" \\
      --config.grid.tokens='(4096, 32768)' --config.examples=4

`recall` is the decoder that `configs/language/needle_model.py` trains. It knows two of the tasks, over its own words.
In `niah_multiquery` T tokens tell T / 6 pairs of a key and a value, and all are asked for one after the other. In
`niah_multikey` they tell T / 3 - 1 pairs, at most 128, and one is asked for. Other checkpoints get all eight tasks, or
those of `tasks`, in their own tokens, with hay from `corpus`. Learned quantizers are fitted to other pairs, or to
training text. With `keep` 0+0 nothing is kept in full precision but the newest 15 tokens at most; 128+4 is the default
of caches.

To see: a decoder makes a token at a time, and its newest tokens are exact. Codes of least error shrink keys, so that a
sharp head no longer finds them beside exact ones. `eden_2` loses nearly all answers, most with a window;
`eden_unbiased_2`, whose codes do not shrink, loses few. Only keys must not shrink: `eden_unbiased_2/eden_2` is as good.
`kivi_2`, of 3 bits with up to 31 exact tokens, answers half without a window.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    two_bits = (
        *("eden_2", "eden_unbiased_2", "eden_unbiased_2/eden_2", "turboquant_trellis_2"),
        *("turboquant_trellis_unbiased_2/turboquant_trellis_2", "rotorquant_2", "kivi_2", "klt_trellis_2+pre_rope"),
    )
    return ConfigDict(
        {
            "experiment": "ruler",
            "tasks": (),
            "corpus": "",
            "examples": 16,
            "seeds": 5,
            "chunk": 16,
            "grid": {
                "model": ("recall",),
                "keep": ("0+0", "128+4"),
                "tokens": (384,),
                "strategy": ("float32", "eden_4", "eden_3", *two_bits),
            },
        }
    )
