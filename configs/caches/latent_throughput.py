"""Caches of multi-head latent attention in codes, on a CPU, against plain latents in bfloat16 in the same run.

Shapes are "<query heads>x<tokens>": 16 heads of DeepSeek V2 Lite, 128 of DeepSeek V3. A strategy "a/b" has what turns
with the positions, 64 coordinates, in codes of a, and the latent, 512 coordinates, in codes of b.

    python -m experiments.run --config=configs/caches/latent_throughput.py --workdir=results/latent_throughput

Nothing else may run beside it.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "latent_throughput",
            "turning": 64,
            "latent": 512,
            "rounds": 16,
            "grid": {
                "shape": ("16x2048", "16x8192", "128x8192"),
                "strategy": (
                    "bfloat16",
                    "rotor_chain_4",
                    "eden_4",
                    "rotorquant_trellis_4",
                    "v2_lean",
                    "rotorquant_trellis_2",
                    "klt_trellis_3",
                    "klt_trellis_2",
                ),
            },
        }
    )
