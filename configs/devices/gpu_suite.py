"""The GPU kernels: their tests on the device, then their speed against dense torch, XLA, bfloat16 attention and a copy.

Claim (RotorQuant, Table 2, 3 bits, d = 128, an NVIDIA RTX PRO 4000 Blackwell): the fused rotor kernel quantizes 1k to
16k vectors in 6 to 39 us. It is 11 to 19 times as fast as the dense pipeline (69 to 740 us). An H200 encoded a million
vectors at 0.72 of the copy bandwidth and decoded them at 0.45, on 2026-11-26 with the kernels of then. Attention to
4 bits took 0.67 of cuDNN's time for bfloat16, but a whole decoder made tokens at 0.33 of the speed.

    python -m experiments.run --config=configs/devices/gpu_suite.py

One Hopper GPU, six minutes; results go to results/h200. Needs jax with CUDA, numpy, scipy, optax, jaxtyping,
absl-py, ml_collections, and pytest with hypothesis for the tests; uses torch, tqdm and matplotlib if they are there.
What cannot be measured says so in its row. `--config.rehearse=True` tries the same in small, on a CPU too.

Whole steps come first (`devices/gpu_steps.py`): appending, attention in a loop on the device, a decoder's tokens and
search, each with its launches and its kernels. A number is device time with cold caches (`devices/gpu_clock.py`), the
share that its least bytes are of the copy bandwidth of the same run, and the ratio to the yardstick. A star marks
functions that wait for the host. Rows of a run before are kept: remove the folder to measure anew. Expected on an
H200: a copy of about 4300 GB/s.
"""

from ml_collections import ConfigDict

VECTORS = (1024, 4096, 8192, 16_384, 65_536, 2**20, 2**22)
KERNELS = (
    ("roundtrip", "rotor"),
    ("encode", "rotor"),
    ("decode", "rotor"),
    ("encode", "hadamard"),
    ("decode", "hadamard"),
    ("encode", "chain"),
    ("decode", "chain"),
    ("encode", "dense"),
    ("encode", "prod"),
    ("encode", "eden"),
)
SHAPES = (
    *(f"{batch}x{tokens}x4" for tokens in (4096, 16_384, 65_536, 262_144) for batch in (1, 8, 32)),
    *(f"8x{tokens}x{groups}" for tokens in (16_384, 65_536) for groups in (1, 8)),
)
"""<batch>x<tokens>x<query heads a KV head>."""
CACHES = ("eden_4", "v2_lean", "turboquant_trellis_3", "eden_4+centered")
STEPS = (
    "append eden_4 rqjax 8x1",
    "append eden_4 rqjax 1x4096",
    *(f"step {cache} rqjax 8x8192x4" for cache in CACHES),
    "step bfloat16 cudnn 8x8192x4",
    *(f"decoder eden_4 rqjax {shape}" for shape in ("8x8192", "1x8192", "8x32768", "1x32768")),
    "search eden_unbiased rqjax 100000x1000",
    "append turboquant_trellis_3 rqjax 8x16",
    "append eden_4+centered rqjax 8x1",
    "step eden_4 rqjax 32x16384x4",
    "step eden_4 rqjax 1x65536x4",
)
"""Whole steps, see `devices/gpu_steps.py`."""
CASES = (
    "tests",
    "copy",
    *STEPS,
    *(f"roundtrip {method} published {n}" for method in ("dense", "rotor") for n in VECTORS[:4]),
    *(
        f"{operation} dense {way} {n}"
        for operation in ("roundtrip", "encode", "decode")
        for way in ("torch", "torch.compile")
        for n in VECTORS
    ),
    *(f"{operation} {method} mosaic_gpu {n}" for operation, method in KERNELS for n in VECTORS),
    *(f"attend {cache} mosaic_gpu {shape}" for shape in SHAPES for cache in ("v3_4", "v2_lean")),
    *(f"attend bfloat16 {by} {shape}" for shape in SHAPES for by in ("cudnn", "torch")),
    "encode trellis xla 65536",
    *(f"{operation} {method} xla {n}" for operation, method in KERNELS for n in VECTORS),
)
"""Cases in the order of their worth, since those after `budget_s` are left out."""


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "experiment": "gpu_suite",
            "workdir": "results/h200",
            "rehearse": False,
            "budget_s": 330,
            "dim": 128,
            "bits": 3,
            "kv_heads": 8,
            "dtype": "float32",
            "rounds": 25,
            "steps": 64,
            "model": "4 layers of Llama 3.2 3B",
            "calls": 24,
            "occupy_mib": 2048,
            "copy_mib": 2048,
            "tests_timeout_s": 200,
            "tests": ("tests/backends/test_kernels.py", "tests/backends/test_decode_attention.py"),
            "grid": {"case": CASES},
        }
    )
