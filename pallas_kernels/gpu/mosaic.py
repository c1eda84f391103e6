"""Parts of Pallas Mosaic GPU that all kernels need, and those that are private or change between versions: only
here."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

LANE = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
"""Lane semantics. Warpgroup, the default from jax 0.11 on, infers layouts for minutes in long kernels."""


def in_place(
    kernel: Callable[..., None],
    out_type: list[jax.ShapeDtypeStruct],
    *,
    aliases: dict[int, int],
    name: str,
    interpret: Any,
    **grid: Any,
) -> Callable[..., list[jax.Array]]:
    """Makes a kernel whose outputs may lie where operands lay: `aliases` has the number of the output by that of the
    operand. `plgpu.kernel` has none, and takes references in their place that `custom_vmap` refuses."""
    from jax._src import config
    from jax._src.pallas.mpmd import _mpmd_map

    def call(*operands):
        mesh = plgpu.Mesh(kernel_name=name, **grid)
        options = {"compiler_params": LANE, "interpret": interpret, "name": name}
        with config._check_vma(False):  # as `plgpu.kernel` has it, for `jax.shard_map`
            return _mpmd_map([(mesh, kernel)], out_type, input_output_aliases=aliases, **options)(*operands)

    return call


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
