"""Products of tiles in registers on the tensor cores of a warpgroup, each step with a twin for Pallas's interpreter.

Tiles are int8 (64, SLICE), in registers as PTX ISA, "wgmma.mma_async", has them; see `registers`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.registers import SLICE, TILE, array, constant, int8, iota, swizzled, words_layout

SLICES = (plgpu.TilingTransform((8, SLICE)), plgpu.SwizzleTransform(SLICE))
"""Layout in shared memory of a product's right side, one column of the product a row."""


def fragments(upper: jax.Array, lower: jax.Array, *, interpret: Any) -> list[jax.Array]:
    """Words of the rows g, and of the rows g + 8, of each warp's 16, as a tile: int8 (64, SLICE), slice by slice."""
    count = upper.shape[0]
    if interpret:
        tile = jnp.stack([_bytes(words).reshape(count, 4, 8, 16) for words in (upper, lower)])
        return jnp.split(tile.transpose(2, 0, 3, 1, 4).reshape(64, 16 * count), 16 * count // SLICE, axis=1)
    each = SLICE // 16
    tile = plgpu.ShapeDtypeStruct((64, SLICE), jnp.int8, plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(words_layout(count),) * 2, return_type=(tile,) * (count // each))
    def place(context, upper, lower):
        four = ir.VectorType.get((4,), int8())
        pairs = [mgpu.utils.bitcast(words.registers[k], four) for k in range(count) for words in (upper, lower)]
        return tuple(
            array(pairs[2 * each * k : 2 * each * (k + 1)], tile.layout, tile.shape, is_signed=True)
            for k in range(count // each)
        )

    return list(place(upper, lower))


def store_transposed(ref: Any, x: jax.Array, row: int, first: int, column: jax.Array, *, interpret: Any) -> None:
    """Writes the low bytes of a tile int32 (64, n) to ref[row + j, first + column[i, j]], j < n, transposed.

    Args:
      ref: int8 in shared memory in tiles of 8 rows and SLICE columns, swizzled.
      x: the tile.
      row: a multiple of 8.
      first: a multiple of SLICE.
      column: int32, as x; all columns of it are equal.
    """
    columns = ref.shape[-1]
    if interpret:
        some = pl.ds(row, x.shape[1])
        ref[some] = ref[some].at[:, first + column[:, 0]].set(x.T.astype(jnp.int8))
        return
    rows = iota(x.shape, 1, TILE, interpret=False)
    offset = swizzled(rows, column, columns, SLICE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SLICES), TILE, TILE), return_type=None)
    def write(context, ref, x, offset):
        base, start = mgpu.utils.memref_ptr(ref), constant(row * columns + 8 * first)
        for pair, places in zip(x.registers.flat, offset.registers.flat, strict=True):
            for k in range(2):
                number, at = (vector.extract(v, dynamic_position=[], static_position=[k]) for v in (pair, places))
                place = mgpu.utils.getelementptr(base, [arith.addi(at, start)], int8())
                llvm.store(arith.trunci(int8(), number), place)

    write(ref, x, offset)


def products(pairs: list[list[tuple[jax.Array, Any]]], *, interpret: Any) -> list[jax.Array]:
    """Sums the products of each list: a tile int8 (64, SLICE) times ref (n, SLICE), transposed, gives int32 (64, n).

    The refs are slices of columns of a ref with the transforms SLICES. All products are issued before the first wait.
    """
    if interpret:
        return [
            sum(jnp.dot(tile, ref[...].T, preferred_element_type=jnp.int32) for tile, ref in terms) for terms in pairs
        ]

    def scope(*sums):
        for total, terms in zip(sums, pairs, strict=True):
            for tile, ref in terms:
                plgpu.wgmma(total, tile, ref.T)
        plgpu.wgmma_wait(0)
        return [plgpu.wgmma_accumulator_load(total, wait_n=None) for total in sums]

    return pl.run_scoped(scope, *[plgpu.ACC((64, terms[0][1].shape[0]), jnp.int32) for terms in pairs])


def _bytes(words: jax.Array) -> jax.Array:
    """int8 (n, 128, 4), the lowest first."""
    return lax.bitcast_convert_type(words, jnp.int8)
