"""Attention of a pretrained decoder from compressed caches: RotorQuant's Table 6, at 2K and 4K tokens.

Claim: 3 and 4 bits keep a cosine of 0.987 to 0.991 and 81 % of the first tokens (Qwen2.5-3B), rotors as well as dense
rotations. The published column is of that model; ours is SmolLM2-135M-Instruct with weights of 4 bits. It does not
hold there: `rotorquant_3` has 0.81 and 35 %, `turboquant_3` 0.96 and 64 %.

    python -m experiments.run --config=configs/language/attention_fidelity.py

The newest 64 queries of one text, prose; deviations are over rotations. No token is in full precision but the newest 15
at most. `klt_trellis` is fitted to 8,192 or 16,384 tokens of four kinds of text. Needs the extra `real`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    random = ("turboquant_3", "rotorquant_3", "rotor_chain_3", "identity_3", "eden_3")
    return ConfigDict(
        {
            "experiment": "attention_fidelity",
            "corpus": "mixed",
            "queries": 64,
            "keep": "0+0",
            "seeds": 3,
            "grid": {
                "model": ("smollm2-135m",),
                "context": (2048, 4096),
                "strategy": (*random, "turboquant_4", "rotorquant_4", "eden_4", "klt_trellis_3+pre_rope"),
            },
        }
    )
