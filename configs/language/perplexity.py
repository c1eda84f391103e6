"""Perplexity through compressed caches: TurboQuant MLX's "Multi-Model Quality", on the decoders of `results/models`.

Claims: 4 bits within 1 % to 4 % of 16 bits, 3.5 bits mixed within 7 %; QJL helps as extra bits (v2_rotated_qjl against
affine_rotated_3) and hurts in the place of a bit (turboquant_prod_3 against v3_3); a larger head dimension helps.

    python -m experiments.run --config=configs/language/perplexity.py
    python -m experiments.run perplexity --config.grid.model="('meta-llama/Llama-3.2-3B',)" \\
      --config.windows=8

`keep` is how many newest and first tokens are in full precision; with 0+0 the newest 15 at most are. The text is 64 KB
of held-out text in chunks of 16 tokens; each seed's rotations serve a quarter of the windows. The exact probabilities
of all windows stay in memory: with a large vocabulary, whose tokens are longer, take fewer. Fifty minutes of one core.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "perplexity",
            "corpus": "",
            "context": 2048,
            "windows": 32,
            "chunk": 16,
            "seeds": 4,
            "grid": {
                "model": ("llama-d128", "qwen2-d64", "gemma3-d256"),
                "keep": ("0+0",),
                "strategy": (
                    "v2_lean",
                    "v2_rotated",
                    "v3_4",
                    "v3_4+centered",
                    "rotorquant_4",
                    "v3_3.5",
                    "v3_3.25",
                    "v3_3",
                    "v3_3+centered",
                    "rotorquant_3",
                    "rotor_chain_3",
                    "eden_4",
                    "eden_3",
                    "nested_e8_3",
                    "turboquant_trellis_3.5",
                    "turboquant_trellis_3",
                    "turboquant_trellis_2.5",
                    "turboquant_trellis_2",
                    "affine_rotated_3",
                    "v2_rotated_qjl",
                    "v2_rotated_qjl_orthogonal",
                    "turboquant_prod_3",
                    "v3_2.75",
                    "v3_2.5",
                    "v3_2",
                    "v3_2+centered",
                ),
            },
        }
    )
