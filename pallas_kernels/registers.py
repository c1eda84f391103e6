"""Operations on the registers of a warpgroup that Pallas does not have, each with a twin for its interpreter.

Words are uint32 arrays (n, 128): n registers of each of 128 threads. Thread t is lane t mod 32 of warp t / 32; by the
layout of matrices in registers (PTX ISA, "wgmma.mma_async") the lanes 4 g to 4 g + 3 hold the rows 16 warp + g and
16 warp + g + 8 of a tile of 64 rows, of each 16 columns four neighboring ones of a byte.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic

THREADS = 128
SLICE = 64
"""Columns of a matrix of bytes that are multiplied at once."""
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
"""Layouts of a number for each row, and for each column, of a tile."""


def tiling(columns: int, dtype: Any = jnp.int8) -> tuple[Any, ...]:
    """How a matrix lies in shared memory: tiles of 8 rows of 128, 64 or 32 bytes, their 16-byte chunks swizzled."""
    size = jnp.dtype(dtype).itemsize
    width = swizzle_width(columns * size)
    return plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width)


def swizzle_width(size: int) -> int:
    """Bytes of a row of a tile, of matrices of so many bytes a row."""
    return next(width for width in (128, 64, 32) if size % width == 0)


def swizzled(row: Any, column: Any, columns: int, width: int) -> Any:
    """The byte where (row, column) of a matrix of so many columns lies, in tiles of 8 rows and `width` columns.

    Of an address in bytes the bits 4 to 6 are exchanged with themselves xor the bits 7 to 9, of which a width of 128
    takes all three, one of 64 the lower two and one of 32 the lowest.
    """
    linear = (row >> 3) * (8 * columns) + (column & -width) * 8 + (row & 7) * width + (column & (width - 1))
    return linear ^ (((linear >> 7) & (width // 16 - 1)) << 4)


def iota(shape: tuple[int, ...], axis: int, layout: Any, *, interpret: Any) -> jax.Array:
    index = lax.broadcasted_iota(jnp.int32, shape, axis)
    return index if interpret else plgpu.layout_cast(index, layout)


def full(value: jax.Array, shape: tuple[int, ...], layout: Any, *, interpret: Any) -> jax.Array:
    array = jnp.full(shape, value)
    return array if interpret else plgpu.layout_cast(array, layout)


def load(ref: Any, layout: Any, *, interpret: Any) -> jax.Array:
    return ref[...] if interpret else mosaic.load(ref, layout)


def store(ref: Any, x: jax.Array, *, interpret: Any) -> None:
    """ref[...] = x, in whatever pieces the layout of x gives; from jax 0.12 on small ones must be asked for."""
    if interpret or not hasattr(plgpu, "store"):
        ref[...] = x
    else:
        plgpu.store(ref, x, optimized=False)


def threads(*, interpret: Any) -> jax.Array:
    """The number of each thread, (128,)."""
    return iota((THREADS,), 0, _words(), interpret=interpret)


def load_words(ref: Any, row: jax.Array, first: int, shift: jax.Array, *, interpret: Any) -> jax.Array:
    """Bytes of row first + row[t], those columns that thread t has in a tile: words (columns / 16, 128) >> shift[t].

    Args:
      ref: bytes (rows, columns) in shared memory with the transforms of `tiling`.
      row: int32 (128,).
      first: a multiple of 8.
      shift: int32 (128,).
    """
    columns = ref.shape[-1]
    count = columns // 16
    if interpret:
        column = 4 * (jnp.arange(THREADS) % 4)[:, None] + jnp.arange(4) + 16 * jnp.arange(count)[:, None, None]
        words = lax.bitcast_convert_type(ref[...][first + row[:, None], column], jnp.uint32)
        return words >> shift.astype(jnp.uint32)
    offset = swizzled(row, 4 * (threads(interpret=False) & 3), columns, min(columns, 128))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiling(columns)), _words(), _words()),
        return_type=plgpu.ShapeDtypeStruct((count, THREADS), jnp.uint32, _words(count)),
    )
    def read(context, ref, offset, shift):
        base, loaded = mgpu.utils.memref_ptr(ref), []
        offset, shift = (_integer(x.registers[0]) for x in (offset, shift))
        for k in range(count):
            block, inside = divmod(16 * k, 128)  # a multiple of 16 below 128 bytes commutes with swizzling
            at = arith.addi(arith.xori(offset, constant(inside)), constant(first * columns + 8 * 128 * block))
            word = llvm.load(_i32(), mgpu.utils.getelementptr(base, [at], _i8()))
            loaded.append(_one(arith.shrui(word, shift)))
        return array(loaded, _words(count), (count, THREADS), is_signed=False)

    return read(ref, offset, shift)


def byte_permute(a: jax.Array, b: jax.Array, selector: jax.Array | int, *, interpret: Any) -> jax.Array:
    """PTX `prmt`: byte i of the result is byte s of (a, b), where s is the i-th nibble of the selector.

    If the nibble's highest bit is set, the result is eight times the highest bit of that byte. Only the low half of the
    selector counts. Words, or uint32 scalars; a selector may be a number.
    """
    if interpret:
        a, b, selector = jnp.broadcast_arrays(a, b, jnp.uint32(selector))
        source = lax.bitcast_convert_type(jnp.stack([a, b], -1), jnp.uint8).reshape(*a.shape, 8)
        nibble = (selector[..., None] >> 4 * jnp.arange(4, dtype=jnp.uint32)) & 15
        byte = jnp.take_along_axis(source, (nibble & 7).astype(jnp.int32), axis=-1)
        repeated = jnp.where(byte >= 128, jnp.uint8(255), jnp.uint8(0))
        return lax.bitcast_convert_type(jnp.where(nibble >= 8, repeated, byte), jnp.uint32)
    fixed = isinstance(selector, int)
    arguments = (a, b) if fixed else (a, b, selector)
    shape = next(x.shape for x in arguments if x.shape)
    layout = _words(shape[0])
    types = tuple(layout if x.shape else plgpu.Layout.WG_SPLAT(()) for x in arguments)

    @plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout))
    def permute(context, *arguments):
        permuted = []
        for k in range(shape[0]):
            words = [_integer(x.registers.flat[k % x.registers.size]) for x in arguments]
            words += [constant(selector)] if fixed else []
            permuted.append(_one(llvm.inline_asm(_i32(), words, "prmt.b32 $0, $1, $2, $3;", "=r,r,r," + "rn"[fixed])))
        return array(permuted, layout, shape, is_signed=False)

    return permute(*arguments)


def fragments(upper: jax.Array, lower: jax.Array, *, interpret: Any) -> list[jax.Array]:
    """Words of the rows g, and of the rows g + 8, of each warp's 16, as a tile: int8 (64, SLICE), slice by slice."""
    count = upper.shape[0]
    if interpret:
        tile = jnp.stack([_bytes(words).reshape(count, 4, 8, 16) for words in (upper, lower)])
        return jnp.split(tile.transpose(2, 0, 3, 1, 4).reshape(64, 16 * count), 16 * count // SLICE, axis=1)
    each = SLICE // 16
    tile = plgpu.ShapeDtypeStruct((64, SLICE), jnp.int8, plgpu.Layout.WGMMA_8BIT)

    @plgpu.inline_mgpu(arg_types=(_words(count),) * 2, return_type=(tile,) * (count // each))
    def place(context, upper, lower):
        four = ir.VectorType.get((4,), _i8())
        pairs = [mgpu.utils.bitcast(words.registers[k], four) for k in range(count) for words in (upper, lower)]
        return tuple(
            array(pairs[2 * each * k : 2 * each * (k + 1)], tile.layout, tile.shape, is_signed=True)
            for k in range(count // each)
        )

    return list(place(upper, lower))


def store_transposed(ref: Any, x: jax.Array, row: int, column: int, *, interpret: Any) -> None:
    """Writes the low bytes of a tile int32 (64, n) to ref[row : row + n, column : column + 64], transposed.

    Args:
      ref: int8 in shared memory in tiles of 8 rows and SLICE columns, swizzled.
      x: the tile.
      row: a multiple of 8.
      column: a multiple of SLICE.
    """
    count, columns = x.shape[1], ref.shape[-1]
    if interpret:
        ref[pl.ds(row, count), pl.ds(column, SLICE)] = x.T.astype(jnp.int8)
        return
    rows, places = (iota(x.shape, axis, TILE, interpret=False) for axis in (1, 0))
    offset = swizzled(rows, places, columns, SLICE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SLICES), TILE, TILE), return_type=None)
    def write(context, ref, x, offset):
        base, start = mgpu.utils.memref_ptr(ref), constant(row * columns + 8 * column)
        for pair, places in zip(x.registers.flat, offset.registers.flat, strict=True):
            for k in range(2):
                number, at = (vector.extract(v, dynamic_position=[], static_position=[k]) for v in (pair, places))
                place = mgpu.utils.getelementptr(base, [arith.addi(at, start)], _i8())
                llvm.store(arith.trunci(_i8(), number), place)

    write(ref, x, offset)


SLICES = (plgpu.TilingTransform((8, SLICE)), plgpu.SwizzleTransform(SLICE))
"""How the right side of a product lies in shared memory, one column of the product a row."""


def products(pairs: list[list[tuple[jax.Array, Any]]], *, interpret: Any) -> list[jax.Array]:
    """For each list the sum of its products: a tile int8 (64, SLICE) times ref (n, SLICE), transposed: int32 (64, n).

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


def _words(count: int | None = None) -> Any:
    """The layout of words, or of one number for each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS,) if count is None else (count, THREADS), vec_size=1)


def _bytes(words: jax.Array) -> jax.Array:
    """int8 (n, 128, 4), the lowest first."""
    return lax.bitcast_convert_type(words, jnp.int8)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i8() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def constant(value: int) -> ir.Value:
    """A word."""
    return mgpu.c(int(np.int32(np.uint32(value))), _i32())


def _integer(register: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(register, _i32())


def _one(word: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(word, ir.VectorType.get((1,), _i32()))


def array(
    registers: list[ir.Value], layout: Any, shape: tuple[int, ...], *, is_signed: bool | None
) -> mgpu.FragmentedArray:
    """Registers as an array of a layout."""
    layout = layout.to_mgpu()
    filled = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=filled, _layout=layout, _is_signed=is_signed)
