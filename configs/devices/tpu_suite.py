"""The TPU kernels: their tests on the device, then their speed against XLA, bfloat16 and jax's paged attention.

Claim of this project: attention to codes reads a quarter of what attention to bfloat16 reads. The compiler's
instructions predict (pallas_kernels/README.md) on a v5e 3 times the speed with affine codes of 4 bits in one group, 1.4
times with Lloyd-Max levels of 4 bits. On a v6e they predict 1.8 and 0.8 times. **It has not run on a TPU yet.**

    python -m experiments.run --config=configs/devices/tpu_suite.py

One TPU, v5 or v6, and minutes; results go to results/tpu. What cannot be measured says so in its row.
`--config.rehearse=True` tries the same in small anywhere, kernels interpreted; of jax's own paged attention it says
that it needs a TPU.
"""

from ml_collections import ConfigDict

CODES = (("encode", "eden"), ("encode", "rotorquant"), ("decode", "eden"), ("roundtrip", "rotorquant"))
SHAPES = tuple(f"8x{tokens}x{groups}" for tokens in (2048, 8192, 32_768) for groups in (1, 4, 8))
"""<batch>x<tokens>x<query heads a KV head>."""
PLAIN = ("bfloat16 dot_product_attention", "bfloat16 paged", "int8 paged")


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "tpu_suite",
            "workdir": "results/tpu",
            "rehearse": False,
            "dim": 128,
            "bits": 4,
            "kv_heads": 8,
            "rounds": 10,
            "calls": 20,
            "tests_timeout_s": 600,
            "tests": ("tests/backends/test_tpu.py",),
            "grid": {
                "case": (
                    "tests",
                    *(f"attend {name} {shape}" for shape in SHAPES for name in PLAIN),
                    *(
                        f"attend {cache} {by} {shape}"
                        for shape in SHAPES
                        for cache in ("eden_4", "eden_3", "v2_lean")
                        for by in ("mosaic_tpu", "mosaic_tpu+pages", "xla")
                    ),
                    *(
                        f"{operation} {method} mosaic_tpu {n}"
                        for operation, method in CODES
                        for n in (4096, 65_536, 2**20)
                    ),
                )
            },
        }
    )
