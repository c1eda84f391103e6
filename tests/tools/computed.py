"""Calls of kernels in tests: interpreted, or by `tests/tools/on_ptx.py` as PTX."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.gpu import mosaic

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for the interpreter, whose programs are compiled once and run once."""


def run(call: Callable[..., Any], *arguments: Any) -> Any:
    """Computes a function of arrays; on a CPU kernels are interpreted and may have no race."""
    found = jax.jit(call, compiler_options=FAST)(*arguments)
    assert not mosaic.races_found()
    return found
