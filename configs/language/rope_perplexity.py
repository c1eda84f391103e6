"""Keys before rotary positions, or less a mean that turns with them: what language models lose.

Claims: a mean that turns with the positions takes more than half off what keys in EDEN codes lose on two of the models,
and next to nothing on gemma3-d256. Codes of keys before rotary positions (KVQuant, Hooper et al. 2024,
arXiv:2401.18079), in a transform code, take off nearly all of it on all three.

    python -m experiments.run --config=configs/language/rope_perplexity.py

Fitted to every layer and head, keys and values apart, on 6,144 tokens of training text, for each seed anew. "a/b" has
the keys of a and the values of b, so that "/float32" shows what keys alone lose; ":calibrated" has the mean of the
training text in the place of the mean of its own first keys. The windows are those of `configs/language/perplexity.py`.
"""

from ml_collections import ConfigDict

from configs.language import perplexity


def get_config() -> ConfigDict:
    config = perplexity.get_config()
    strategies = (
        "eden_3/float32",
        "eden_3/float32+turned",
        "eden_3/float32+turned:calibrated",
        "eden_2/float32",
        "eden_2/float32+turned",
        "eden_2/float32+turned:calibrated",
        "klt_trellis_2/float32",
        "klt_trellis_2/float32+pre_rope",
        "eden_3",
        "eden_3+turned",
        "eden_3+turned:calibrated",
        "eden_2",
        "eden_2+turned",
        "eden_2+turned:calibrated",
        "turboquant_trellis_3",
        "turboquant_trellis_2",
        "klt_trellis_2",
        "klt_trellis_2+pre_rope",
        "klt_trellis_1/klt_trellis_2+pre_rope",
    )
    config.update({"chunk": 64, "grid": {"strategy": strategies}})
    return config
