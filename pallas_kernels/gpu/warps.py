"""Operations of the threads of a warp on their registers, each with a twin for Pallas's interpreter.

As in `registers`, a word is a uint32 array (128,): one register of each thread. Lane 4 g + q of a warp has the row g
and the columns q of matrices, as PTX ISA, "mma.m16n8k32", has them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.registers import THREADS, array, constant, int8, int32, tiling, words_layout

Word = jax.Array
Product = tuple[int, list[Word], list[Word]]
"""Number of a sum, and the left and right side of a product that is added to it."""


def load(
    refs: Any, offset: jax.Array, count: int, *, half: jax.Array | None = None, tiled: bool = False, interpret: Any
) -> list[Word]:
    """Loads `count` neighboring words (1, 2 or 4) for each thread t, from byte offset[t] on.

    Args:
      refs: the ref in shared or global memory, or two, of which thread t reads refs[half[t]].
      offset: int32 (128,), multiples of 4 count; if `tiled`, as `registers.swizzled` returns them.
      count: the number of words.
      half: int32 (128,), 0 or 1.
      tiled: True if the refs are bytes (rows, columns) with the transforms of `registers.tiling`.
      interpret: False, or what `mosaic.interpreter` returns.
    """
    refs = refs if isinstance(refs, tuple) else (refs,)
    if interpret:
        data = jnp.stack([_bytes(ref[...], tiled) for ref in refs])
        at = offset.astype(jnp.int32)[:, None] + jnp.arange(4 * count)
        found = data[0 if half is None else half[:, None], at].reshape(THREADS, count, 4)
        return list(jnp.moveaxis(lax.bitcast_convert_type(found, jnp.uint32), 1, 0))
    transforms = tiling(refs[0].shape[-1]) if tiled else ()
    numbers = (offset,) if half is None else (offset, half)

    @plgpu.inline_mgpu(
        arg_types=(*[plgpu.RefType(transforms)] * len(refs), *[words_layout()] * len(numbers)),
        return_type=(_word(jnp.uint32),) * count,
    )
    def read(context, *arguments):
        base, *others = (mgpu.utils.memref_ptr(ref) for ref in arguments[: len(refs)])
        offset, *half = (_register(x) for x in arguments[len(refs) :])
        for other, number in zip(others, half, strict=True):  # the distance of two refs is known to the compiler
            distance = arith.subi(*(llvm.ptrtoint(int32(), x) for x in (other, base)))
            offset = arith.addi(offset, arith.muli(number, distance))
        place = mgpu.utils.getelementptr(base, [offset], int8())
        found = llvm.load(ir.VectorType.get((count,), int32()), place, alignment=4 * count)
        return tuple(_array(llvm.extractelement(found, mgpu.c(k, int32()))) for k in range(count))

    return list(read(*refs, *numbers))


def store(ref: Any, offset: jax.Array, words: list[jax.Array], *, interpret: Any) -> None:
    """Stores neighboring words of each thread t (1, 2 or 4) from byte offset[t] of a ref of words on.

    Threads that store to one place store the same.
    """
    if interpret:
        at = offset.astype(jnp.int32)[:, None] // 4 + jnp.arange(len(words))
        numbers = lax.bitcast_convert_type(jnp.stack(words, 1), ref.dtype)
        ref[...] = ref[...].reshape(-1).at[at].set(numbers).reshape(ref.shape)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), *[words_layout()] * (1 + len(words))), return_type=None)
    def write(context, ref, offset, *words):
        place = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [_register(offset)], int8())
        vector = llvm.mlir_undef(ir.VectorType.get((len(words),), int32()))
        for k, word in enumerate(words):
            vector = llvm.insertelement(vector, _register(word), mgpu.c(k, int32()))
        llvm.store(vector, place, alignment=4 * len(words))

    write(ref, offset, *words)


def multiply_add(sums: list[list[jax.Array]], products: list[Product], *, interpret: Any) -> list[list[jax.Array]]:
    """Adds products on tensor cores: of 16 rows of 32 int8 (4 words), and 8 columns of 32 (2 words).

    To float32 sums it adds products of 16 rows of 8 float16 (2 words), and 8 columns of 8 (1 word).

    Args:
      sums: int32 or float32 (128,), four for each: the rows g and g + 8, each of the columns 2 q and 2 q + 1.
      products: which sum each is added to; left sides are the rows g, g + 8 of bytes 4 q, then those of 16 + 4 q; right
        sides are the column g of both. float16 numbers are those of bytes 4 q.
      interpret: False, or what `mosaic.interpreter` returns.
    """
    sums = [list(some) for some in sums]
    of_sum, right_words = sums[0][0].dtype, len(products[0][2])
    if interpret:
        of = jnp.int8 if of_sum == jnp.int32 else jnp.float16

        def numbers_of(words, *shape):
            numbers = lax.bitcast_convert_type(jnp.stack([jnp.stack(some) for some in words]), of).astype(of_sum)
            return numbers.reshape(-1, right_words, *shape, 4, 8, 4, numbers.shape[-1])  # parts of k, warps, g, q

        left = numbers_of([left for _, left, _ in products], 2).transpose(0, 3, 2, 4, 1, 5, 6)
        right = numbers_of([right for *_, right in products]).transpose(0, 2, 3, 1, 4, 5)
        left, right = left.reshape(len(products), 4, 16, -1), right.reshape(len(products), 4, 8, -1)
        found = jnp.einsum("pwik,pwjk->pwij", left, right, precision=lax.Precision.HIGHEST)
        found = found.reshape(-1, 4, 2, 8, 4, 2).transpose(0, 2, 5, 1, 3, 4).reshape(-1, 4, THREADS)
        for (i, *_), product in zip(products, found, strict=True):
            sums[i] = [x + y for x, y in zip(sums[i], product, strict=True)]
        return sums
    words = [word for _, left, right in products for word in (*left, *right)]
    flat = [x for some in sums for x in some]

    @plgpu.inline_mgpu(arg_types=(words_layout(),) * (len(flat) + len(words)), return_type=(_word(of_sum),) * len(flat))
    def multiply(context, *arguments):
        arguments, each = [_register(x) for x in arguments], 3 * right_words
        for k, (i, *_) in enumerate(products):
            factors = arguments[len(flat) + each * k :][:each]
            four = slice(4 * i, 4 * i + 4)
            found = llvm.inline_asm(
                ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>"),
                [*factors, *arguments[four]],
                MULTIPLY_ADD[of_sum.name],
                FIELDS + ",r" * (each + 4),
            )
            arguments[four] = [llvm.extractvalue(int32(), found, [j]) for j in range(4)]
        of = _float32 if of_sum == jnp.float32 else functools.partial(_array, signed=True)
        return tuple(of(x) for x in arguments[: len(flat)])

    found = multiply(*flat, *words)
    return [list(found[k : k + 4]) for k in range(0, len(found), 4)]


MULTIPLY_ADD = {
    "int32": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
    "float32": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
}
FIELDS = "=r,=r,=r,=r"


def look_up(ref: Any, offsets: list[Word], *, interpret: Any) -> list[Word]:
    """Loads bytes of a ref in shared memory at the two halves of each word; four are a word of the result."""
    if interpret:
        data = _bytes(ref[...], False)
        at = lax.bitcast_convert_type(jnp.stack(offsets), jnp.uint16).astype(jnp.int32)
        found = data[at].reshape(-1, 2, THREADS, 2).swapaxes(1, 2).reshape(-1, THREADS, 4)
        return list(lax.bitcast_convert_type(found, jnp.uint32))
    count = len(offsets) // 2

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(()), *[words_layout()] * len(offsets)), return_type=(_word(jnp.uint32),) * count
    )
    def read(context, ref, *offsets):
        base = mgpu.utils.memref_ptr(ref)

        def byte(offset):
            return arith.extui(int32(), llvm.load(int8(), mgpu.utils.getelementptr(base, [offset], int8())))

        def joined(low, high, by):
            return llvm.inline_asm(int32(), [high, constant(by), low], "mad.lo.u32 $0, $1, $2, $3;", "=r,r,n,r")

        halves = []
        for offset in map(_register, offsets):
            low, high = arith.andi(offset, constant(0xFFFF)), arith.shrui(offset, constant(16))
            halves.append(joined(byte(low), byte(high), 1 << 8))
        return tuple(_array(joined(*halves[k : k + 2], 1 << 16)) for k in range(0, len(halves), 2))

    return list(read(ref, *offsets))


def joined(words: list[Word]) -> Word:
    """Joins the lowest bytes of four words, above which there are zeros, as sums of products."""
    a, b, c, d = words
    return (b * np.uint32(256) + a) + (d * np.uint32(256) + c) * np.uint32(65536)


def shuffle(x: jax.Array, lane: jax.Array | None = None, *, xor: int | None = None, interpret: Any) -> jax.Array:
    """Returns x (128,) of another lane of the warp: of lane[t], or of this lane xor a number."""
    if interpret:
        thread = jnp.arange(THREADS)
        return x[(thread & -32) | lane.astype(jnp.int32) if xor is None else thread ^ xor]
    arguments = (x,) if xor is not None else (x, lane)

    @plgpu.inline_mgpu(arg_types=(words_layout(),) * len(arguments), return_type=_word(x.dtype))
    def move(context, x, *lane):
        text = f"shfl.sync.bfly.b32 $0, $1, {xor}, 31, -1;" if xor else "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
        operands = [_register(x), *map(_register, lane)]
        found = llvm.inline_asm(int32(), operands, text, "=r" + ",r" * len(operands), has_side_effects=True)
        word = mgpu.utils.bitcast(found, ir.VectorType.get((1,), x.mlir_dtype))
        return array([word], words_layout(), (THREADS,), is_signed=x.is_signed)

    return move(*arguments)


def kept_apart(*, interpret: Any) -> None:
    """Keeps loads before this from those behind it: the compiler would spill what all of them return."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(), return_type=None)
    def sync(context):
        llvm.inline_asm(None, [], "bar.warp.sync -1;", "~{memory}", has_side_effects=True)

    sync()


def settled(numbers: list[jax.Array], *, interpret: Any) -> list[jax.Array]:
    """Returns float32 numbers, computed here: the compiler would keep what they are made of until they are used."""
    if interpret:
        return numbers

    @plgpu.inline_mgpu(arg_types=(words_layout(),) * len(numbers), return_type=(_word(jnp.float32),) * len(numbers))
    def move(context, *numbers):
        text = "mov.b32 $0, $1;"
        found = (llvm.inline_asm(int32(), [_register(x)], text, "=r,r", has_side_effects=True) for x in numbers)
        return tuple(map(_float32, found))

    return list(move(*numbers))


def complement(word: Word, minus_one: jax.Array, *, interpret: Any) -> Word:
    """Flips all bits, as word * -1 - 1: the pipe for logic has half the rate and more to do.

    `minus_one` is a uint32 scalar that the compiler does not know, or it would use logic.
    """
    if interpret:
        return word * minus_one + minus_one

    @plgpu.inline_mgpu(arg_types=(words_layout(), plgpu.Layout.WG_SPLAT(())), return_type=_word(jnp.uint32))
    def multiply(context, word, by):
        operands = [_register(word), _register(by), _register(by)]
        return _array(llvm.inline_asm(int32(), operands, "mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r"))

    return multiply(word, minus_one)


def log2(x: jax.Array, *, interpret: Any) -> jax.Array:
    """Approximates the logarithms of float32 (128,) in one instruction."""
    if interpret:
        return jnp.log2(x)

    @plgpu.inline_mgpu(arg_types=(words_layout(),), return_type=_word(jnp.float32))
    def of(context, x):
        return _float32(llvm.inline_asm(int32(), [_register(x)], "lg2.approx.ftz.f32 $0, $1;", "=r,r"))

    return of(x)


def halves(word: Word, *, interpret: Any) -> list[jax.Array]:
    """Converts the two float16 numbers of a word to float32."""
    if interpret:
        both = lax.bitcast_convert_type(word, jnp.float16).astype(jnp.float32)
        return [both[:, 0], both[:, 1]]

    @plgpu.inline_mgpu(arg_types=(words_layout(),), return_type=(_word(jnp.float32),) * 2)
    def convert(context, word):
        text = "{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, $1;\n\tcvt.f32.f16 $0, %s;\n\t}"
        words = [llvm.inline_asm(int32(), [_register(word)], text % part, "=r,r") for part in ("low", "high")]
        return tuple(map(_float32, words))

    return list(convert(word))


def to_halves(low: jax.Array, high: jax.Array, *, interpret: Any) -> Word:
    """Rounds two float32 numbers to the float16 of a word."""
    if interpret:
        return lax.bitcast_convert_type(jnp.stack([low, high], -1).astype(jnp.float16), jnp.uint32)

    @plgpu.inline_mgpu(arg_types=(words_layout(),) * 2, return_type=_word(jnp.uint32))
    def convert(context, low, high):
        operands = [_register(high), _register(low)]
        return _array(llvm.inline_asm(int32(), operands, "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r"))

    return convert(low, high)


def _bytes(value: jax.Array, tiled: bool) -> jax.Array:
    """Returns the bytes of an array (rows, columns) in the order of memory."""
    data = lax.bitcast_convert_type(value, jnp.uint8)
    if not tiled:
        return data.reshape(-1)
    rows, columns = data.shape
    width = next(transform.swizzle for transform in tiling(columns) if isinstance(transform, plgpu.SwizzleTransform))
    data = data.reshape(rows // 8, 8, columns // width, width).swapaxes(1, 2).reshape(-1)
    at = jnp.arange(data.size)
    return data[at ^ (((at >> 7) & (width // 16 - 1)) << 4)]


def _word(dtype: Any) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((THREADS,), dtype, words_layout())


def _register(x: mgpu.FragmentedArray) -> ir.Value:
    return mgpu.utils.bitcast(x.registers.flat[0], int32())


def _array(word: ir.Value, *, signed: bool = False) -> mgpu.FragmentedArray:
    words = [mgpu.utils.bitcast(word, ir.VectorType.get((1,), int32()))]
    return array(words, words_layout(), (THREADS,), is_signed=signed)


def _float32(word: ir.Value) -> mgpu.FragmentedArray:
    words = [mgpu.utils.bitcast(word, ir.VectorType.get((1,), ir.F32Type.get()))]
    return array(words, words_layout(), (THREADS,), is_signed=None)
