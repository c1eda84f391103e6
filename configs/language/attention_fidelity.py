"""Attention of the decoders of `results/models` from compressed caches: RotorQuant's Table 6, at 2K and 4K tokens.

Claim: 3 and 4 bits keep a cosine of 0.987 to 0.991 and 81 % of the first tokens (Qwen2.5-3B), rotors as well as dense
rotations. The models here are small and were trained on 2048 tokens; the published column stands beside llama-d128.
The newest 64 queries, no token in full precision but the newest 15 at most. `klt_trellis` learns from training text.

    python -m experiments.run --config=configs/language/attention_fidelity.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "attention_fidelity",
            "corpus": "",
            "queries": 64,
            "keep": "0+0",
            "seeds": 5,
            "grid": {
                "model": ("llama-d128", "qwen2-d64", "gemma3-d256"),
                "context": (2048, 4096),
                "strategy": (
                    "turboquant_3",
                    "rotorquant_3",
                    "rotor_chain_3",
                    "identity_3",
                    "eden_3",
                    "turboquant_4",
                    "rotorquant_4",
                    "rotor_chain_4",
                    "eden_4",
                    "eden_3+turned",
                    "klt_trellis_3",
                    "klt_trellis_3+pre_rope",
                ),
            },
        }
    )
