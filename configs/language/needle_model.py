"""Exact recall of a trained two-layer decoder through compressed caches, keys and values compressed apart.

Claim (TurboQuant, RotorQuant): needles are found as well as in full precision, down to 2 bits. There one needle is
looked for in unrelated text; here all the context is pairs of a key and a value, three tokens each.

    python -m experiments.run --config=configs/language/needle_model.py

"a/b" has the keys of a and the values of b. The training takes some minutes and is kept in `folder`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    methods = (
        *("v3_4", "v3_3", "v3_2", "rotorquant_2", "v3_2/float32", "float32/v3_2"),
        *("turboquant_prod_2", "eden_2", "eden_unbiased_2"),
    )
    return ConfigDict(
        {
            "experiment": "needle_model",
            "folder": "runs/models",
            "stages": (8, 16, 32, 64, 128),
            "steps": 2500,
            "batch_tokens": 4096,
            "sequences": 16,
            "keep": "0+0",
            "seeds": 5,
            "grid": {
                "pairs": (32, 64, 128),
                "strategy": (*methods, "eden_2+turned", "klt_trellis_2+pre_rope"),
            },
        }
    )
