"""Two kernels for the tests of the harness: one as kernels should be, and one that needs too many registers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS, COLUMNS = 64, 128
HELD = 512
SHARED = ROWS * COLUMNS * 4 + 8
"""Bytes of shared memory of `doubled`: a tile of float32 and a barrier."""


def _call(body: Any, x: jax.Array, grid: int, scratch: tuple[Any, ...] = ()) -> jax.Array:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(grid,),
        grid_names=("tile",),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x)


def fits() -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Doubles tiles by way of shared memory, twice: the second kernel equals the first and is compiled once."""

    def doubled(x_ref, out_ref, tile_ref, barrier):
        rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], tile_ref, barrier)
        plgpu.barrier_wait(barrier)
        out_ref[rows] = tile_ref[...] * 2

    scratch = (plgpu.SMEM((ROWS, COLUMNS), jnp.float32), plgpu.Barrier())
    call = lambda x: _call(doubled, x, 2, scratch)  # noqa: E731
    return lambda x: call(call(x) + 1), (jax.ShapeDtypeStruct((2 * ROWS, COLUMNS), jnp.float32),)


def spills() -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Every thread holds `HELD` numbers until it knows their sum; it has 255 registers."""

    def hoarded(x_ref, out_ref):
        columns = pl.ds(lax.axis_index("tile") * COLUMNS, COLUMNS)
        rows = [x_ref[i, columns] for i in range(HELD)]
        total = sum(rows[1:], rows[0])
        for i, row in enumerate(rows):
            out_ref[i, columns] = row * total

    return lambda x: _call(hoarded, x, 1), (jax.ShapeDtypeStruct((HELD, COLUMNS), jnp.float32),)
