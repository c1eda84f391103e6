"""Calls of kernels in tests: interpreted, or by `tests/tools/on_ptx.py` as PTX."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.gpu import mosaic

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for the interpreter, whose programs are compiled once and run once."""


@functools.lru_cache(maxsize=8)
def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function, the same function once for operands of the same shapes."""
    return jax.jit(call, compiler_options=FAST)


def run(call: Callable[..., Any], *arguments: Any) -> Any:
    """Computes a function of arrays; on a CPU kernels are interpreted and may have no race."""
    found = compiled(call)(*arguments)
    assert not mosaic.races_found()
    return found
