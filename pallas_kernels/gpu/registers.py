"""Operations on the registers of a warpgroup that Pallas does not have, each with a twin for its interpreter.

Words are uint32 arrays (n, 128): n registers of each of 128 threads. Thread t is lane t mod 32 of warp t / 32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic

THREADS = 128
TILE = plgpu.Layout.WGMMA
"""Layout of a tile of 64 rows, as the PTX ISA says ("wgmma.mma_async")."""


def tiling(columns: int, dtype: Any = jnp.int8) -> tuple[Any, ...]:
    """Returns a matrix's layout in shared memory: tiles of 8 rows of 128, 64 or 32 bytes, their 16-byte chunks
    swizzled."""
    size = jnp.dtype(dtype).itemsize
    width = swizzle_width(columns * size)
    return plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width)


def swizzle_width(size: int) -> int:
    """Returns the bytes in a row of a tile, for matrices with `size` bytes a row."""
    return next(width for width in (128, 64, 32) if size % width == 0)


def swizzled(row: Any, column: Any, columns: int, width: int) -> Any:
    """The byte where (row, column) of a matrix of so many columns lies, in tiles of 8 rows and `width` columns.

    Bits 4 to 6 of the address become themselves xor the bits 7 to 9. A width of 128 takes all three of the latter, one
    of 64 the lower two, one of 32 the lowest.
    """
    linear = (row >> 3) * (8 * columns) + (column & -width) * 8 + (row & 7) * width + (column & (width - 1))
    return linear ^ (((linear >> 7) & (width // 16 - 1)) << 4)


def full(value: jax.Array, shape: tuple[int, ...], layout: Any, *, interpret: Any) -> jax.Array:
    array = jnp.full(shape, value)
    return array if interpret else plgpu.layout_cast(array, layout)


def load(ref: Any, layout: Any, *, interpret: Any) -> jax.Array:
    return ref[...] if interpret else mosaic.load(ref, layout)


def store(ref: Any, x: jax.Array, *, interpret: Any) -> None:
    """Writes ref[...] = x in the pieces that the layout of x gives; from jax 0.12 on small ones must be asked for."""
    if interpret or not hasattr(plgpu, "store"):
        ref[...] = x
    else:
        plgpu.store(ref, x, optimized=False)


def threads(*, interpret: Any) -> jax.Array:
    """The number of each thread, (128,)."""
    index = lax.iota(jnp.int32, THREADS)
    return index if interpret else plgpu.layout_cast(index, words_layout())


def look_up(ref: Any, indices: list[jax.Array], first: jax.Array, *, interpret: Any) -> list[list[jax.Array]]:
    """Loads bytes of a ref (rows, 128) in shared memory at first[t] + the four bytes of index[t] for each thread t.

    Args:
      ref: int8, without transforms.
      indices: words (128,) of four indices.
      first: uint32 (128,), multiples of 256.

    Returns:
      For each word of indices four words, each a byte and zeros above it.
    """
    if interpret:
        at = first[:, None] + lax.bitcast_convert_type(jnp.stack(indices), jnp.uint8)
        found = lax.bitcast_convert_type(ref[...].reshape(-1)[at.astype(jnp.int32)], jnp.uint8).astype(jnp.uint32)
        return [list(jnp.moveaxis(each, -1, 0)) for each in found]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), *[words_layout()] * (1 + len(indices))),
        return_type=(plgpu.ShapeDtypeStruct((THREADS,), jnp.uint32, words_layout()),) * (4 * len(indices)),
    )
    def read(context, ref, first, *indices):
        # Addresses have 32 bits. LLVM's, of 64 bits, would take two more instructions for each byte.
        base = llvm.ptrtoint(int32(), mgpu.utils.memref_ptr(ref))  # a multiple of 1024, as Pallas places all
        page, loaded = arith.addi(base, _integer(first.registers.flat[0])), []
        for index in (_integer(x.registers.flat[0]) for x in indices):
            for k in range(4):
                text = f"{{\n\t.reg .b32 at;\n\tprmt.b32 at, $1, $2, 0x765{k};\n\tld.shared.u8 $0, [at];\n\t}}"
                loaded.append(llvm.inline_asm(int32(), [index, page], text, "=r,r,r", has_side_effects=True))
        return tuple(array([_one(x)], words_layout(), (THREADS,), is_signed=False) for x in loaded)

    found = read(ref, first, *indices)
    return [list(found[k : k + 4]) for k in range(0, len(found), 4)]


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
    layout = words_layout(*shape[:-1])
    types = tuple(layout if x.shape else plgpu.Layout.WG_SPLAT(()) for x in arguments)

    @plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout))
    def permute(context, *arguments):
        permuted = []
        for k in range(math.prod(shape[:-1])):
            words = [_integer(x.registers.flat[k % x.registers.size]) for x in arguments]
            words += [constant(selector)] if fixed else []
            permuted.append(_one(llvm.inline_asm(int32(), words, "prmt.b32 $0, $1, $2, $3;", "=r,r,r," + "rn"[fixed])))
        return array(permuted, layout, shape, is_signed=False)

    return permute(*arguments)


def words_layout(count: int | None = None) -> Any:
    """The layout of words, or of one number for each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS,) if count is None else (count, THREADS), vec_size=1)


def int32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def int8() -> ir.Type:
    return ir.IntegerType.get_signless(8)


def constant(value: int) -> ir.Value:
    """Returns a word as an MLIR value."""
    return mgpu.c(int(np.int32(np.uint32(value))), int32())


def _integer(register: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(register, int32())


def _one(word: ir.Value) -> ir.Value:
    return mgpu.utils.bitcast(word, ir.VectorType.get((1,), int32()))


def array(
    registers: list[ir.Value], layout: Any, shape: tuple[int, ...], *, is_signed: bool | None
) -> mgpu.FragmentedArray:
    """Registers as an array of a layout."""
    layout = layout.to_mgpu()
    filled = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=filled, _layout=layout, _is_signed=is_signed)
