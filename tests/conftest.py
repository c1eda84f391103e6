"""The tests compile more than they compute, so LLVM does not optimise.

What XLA fuses, stores and divides by is decided before and stays the same, figures of memory included.
Set before anything imports jax; processes that tests start inherit it.
"""

import os

LEVEL = "--xla_backend_optimization_level"
FLAGS = os.environ.get("XLA_FLAGS", "")
if LEVEL not in FLAGS:
    os.environ["XLA_FLAGS"] = f"{FLAGS} {LEVEL}=0".strip()
