"""Parts of Pallas Mosaic GPU that all kernels need, and those that are private or change between versions: only
here."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
"""Lane semantics. Warpgroup, the default from jax 0.11 on, infers layouts for minutes in long kernels."""


def interpreter(*, detect_races: bool = True) -> Any:
    """The value of `interpret` with which a kernel runs on a CPU."""
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(detect_races=detect_races)


def interpret() -> Any:
    """The value of `interpret` for tests: False on a GPU that runs the kernels, else the interpreter."""
    return False if jax.default_backend() == "gpu" else interpreter()


def races_found() -> bool:
    """Returns whether the last interpreted kernel read or wrote memory that another thread or copy was writing."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks._races is not None and gpu_callbacks._races.races_found


def load(ref: Any, layout: Any) -> jax.Array:
    """The numbers of `ref` in registers of a layout; the index argument of `plgpu.load` went away in 0.12."""
    try:
        return plgpu.load(ref, layout=layout, optimized=False)
    except TypeError:
        return plgpu.load(ref, (), layout=layout, optimized=False)
