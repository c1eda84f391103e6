"""TurboQuant MLX, "KV-Cache Compression at T=8192": bytes of whole caches.

Claim: 969 MB in float16 become 266 (V2, 4 bits), 236, 207 and 177 MB (V3 at 3.5, 3 and 2.5 bits). The 969 MB are 28
layers of 8 heads with buffers of 8448 tokens. Expected: a few MB less for V3, window of 128 and 4 first tokens in
bfloat16 included. V2 takes more than is published. Its groups of 64 pay half a bit an element for scales and biases,
where one norm a token is an eighth of a bit.

To see: every strategy takes less than a third of float16's bytes, v3_3 between a fourth and a fifth, v3_2 less than a
sixth. The published sizes of V3 hold with a MB or more to spare; the published size of V2 does not hold.

    python -m experiments.run --config=configs/caches/kv_memory.py
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "kv_memory",
            "context": 8192,
            "grid": {
                "model": ("Llama 3.2 3B", "Llama 3.1 8B", "Gemma 3 4B", "Qwen2.5 3B"),
                "strategy": (
                    "float16",
                    "v2_lean",
                    "v2_rotated",
                    "v2_rotated_qjl",
                    "v3_4",
                    "v3_3.5",
                    "v3_3.25",
                    "v3_3",
                    "v3_2.75",
                    "v3_2.5",
                    "v3_2",
                    "rotorquant",
                    "rotor_chain_3",
                    "eden_3+centered",
                ),
            },
        }
    )
