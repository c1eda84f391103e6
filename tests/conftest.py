"""How the tests run: the compiler's effort, and which files are collected.

The tests compile more than they compute, so LLVM does not optimise: what XLA fuses, stores and divides by is decided
before and stays the same, figures of memory included. This is set before anything imports jax; processes that tests
start inherit it. Files on kernels are collected only where jax can express them; jax-mps has those of MLX from 0.10 on.
"""

import os

import hopper

# Workers of pytest-xdist have a core each: two of them on two cores, each with threads for both, would wait for each
# other half of the time.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(WORKER.removeprefix("gw")) % len(cores)]})

LEVEL = "--xla_backend_optimization_level"
FLAGS = os.environ.get("XLA_FLAGS", "")
if LEVEL not in FLAGS:
    os.environ["XLA_FLAGS"] = f"{FLAGS} {LEVEL}=0".strip()

collect_ignore = (
    [] if hopper.has_kernels() else ["test_lowering.py", "test_kernels.py", "test_decode_attention.py", "test_mps.py"]
)
if not hopper.wheels():
    collect_ignore.append("test_compile.py")
elif hopper.folder().exists():
    collect_ignore.append("test_lowering.py")  # compiling begins with it
