"""Tiles of tokens in which every thread works on one token, or on a part of one.

So norms, rotations and packing need no exchange between threads, whatever the dimension.

To Pallas a number per thread is an array of shape (128,), the threads of a warpgroup. Pallas cannot express a thread's
own place in memory. That is written in Mosaic's operations, beside its plain form for the interpreter.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import registers
from pallas_kernels.gpu.registers import THREADS, array, constant, swizzle_width, threads

PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
Combine: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]


STEP = 32
"""Numbers of an array that are on their way to a thread at once, while it multiplies as many others."""
Spread: TypeAlias = tuple[jax.Array, jax.Array | None]


class Rows(NamedTuple):
    """Partition of a tile among the threads: thread t has token t % tokens of the tile and part t // tokens of it."""

    tokens: int
    interpret: bool

    @property
    def parts(self) -> int:
        """Threads that work on one token."""
        return THREADS // self.tokens

    @property
    def thread(self) -> jax.Array:
        return threads(interpret=self.interpret)

    @property
    def token(self) -> jax.Array:
        return self.thread & (self.tokens - 1)

    @property
    def part(self) -> jax.Array:
        return self.thread >> (self.tokens.bit_length() - 1)

    def full(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        x = jnp.full((THREADS,), value, dtype)
        return x if self.interpret else plgpu.layout_cast(x, PER_THREAD)

    def swizzled(self, dim: int, dtype: Any, *stages: int) -> Any:
        """Shared memory for vectors (tokens, d), in which 8 threads read 16 bytes of 8 rows without a bank conflict.

        Its shape is (blocks, tokens, columns). Tiles of 8 rows would do as well, but a copy into them takes only arrays
        with a multiple of 8 rows; one into blocks stops at the last row. The interpreter has neither blocks nor views.
        """
        if self.interpret:
            return plgpu.SMEM((*stages, self.tokens, dim), dtype)
        columns = _columns(dim, dtype)
        return plgpu.SMEM((*stages, dim // columns, self.tokens, columns), dtype, transforms=_swizzle(columns, dtype))

    def blocks(self, x: Any) -> Any:
        """Vectors (n, d) as (n, blocks, columns), to be copied to and from `by_token`."""
        return x if self.interpret else x.reshape(x.shape[0], -1, _columns(x.shape[1], x.dtype))

    def by_token(self, ref: Any) -> Any:
        """The view (tokens, blocks, columns) of `swizzled` memory."""
        return ref if self.interpret else ref.transpose((1, 0, 2))

    def flat(self, ref: Any) -> Any:
        """The view (tokens, d) of `swizzled` memory."""
        if self.interpret:
            return ref
        tiles = ref.reshape(1, *ref.shape)
        untiling = plgpu.TilingTransform(ref.shape[1:]).undo(tiles)
        return dataclasses.replace(tiles, transforms=(*tiles.transforms, untiling))

    def peek(self, ref: Any, row: jax.Array, column: jax.Array, width: int = 1, at: "At" = (0, 0)) -> list[jax.Array]:
        """Reads the numbers ref[row, column + offset + (0 ... width - 1)] of each thread, swizzled memory or not.

        `at` is the offset and a power of two, or 0. A power divides the offset and exceeds the columns, so that most of
        the address does not depend on the offset.
        """
        if self.interpret:
            found = ref[...][row[:, None], (column + at[0])[:, None] + jnp.arange(width)]
            return [found[:, i] for i in range(width)]
        transforms = _transforms(ref)
        number = plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, PER_THREAD)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), PER_THREAD), return_type=(number,) * width)
        def go(_, ref, byte):
            words = llvm.load(_vector(ref, width), _address(ref, byte))
            return tuple(_number(vector.extract(words, [], [i]), number.dtype) for i in range(width))

        return list(go(ref, _byte(ref, row, column, at)))

    def poke(
        self,
        ref: Any,
        row: jax.Array,
        column: jax.Array,
        values: list[jax.Array],
        where: jax.Array | None = None,
        at: "At" = (0, 0),
    ) -> None:
        """Writes the numbers that `peek` would read; if `where` is given, only for these threads."""
        if self.interpret:
            place = row[:, None], (column + at[0])[:, None] + jnp.arange(len(values))
            if where is not None:
                place = jnp.where(where[:, None], place[0], ref.shape[0]), place[1]
            ref[...] = ref[...].at[place].set(jnp.stack(values, axis=1), mode="drop")
            return
        transforms = _transforms(ref)
        mask = () if where is None else (where.astype(jnp.int32),)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), *(PER_THREAD,) * (1 + len(mask) + len(values))))
        def go(_, ref, byte, *numbers):
            def store():
                words = vector.from_elements(_vector(ref, len(values)), [_element(x) for x in numbers[len(mask) :]])
                llvm.store(words, _address(ref, byte))

            if not mask:
                return store()
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, _element(numbers[0]), constant(0))):
                store()

        go(ref, _byte(ref, row, column, at), *mask, *values)

    def fill(self, ref: Any, count: int, values: Callable[[jax.Array], jax.Array]) -> None:
        """Writes ref[0, i] = values(i) for each i below `count`, a thread each."""
        for first in range(0, count, THREADS):
            column = jnp.minimum(self.thread + first, count - 1)
            self.poke(ref, self.part * 0, column, [values(column)])

    def block(
        self, ref: Any, row: jax.Array, column: jax.Array, rows: int = 1, width: int = 1, step: int = 1
    ) -> list[list[jax.Array]]:
        """Reads the numbers ref[row + step (0 ... rows - 1), column + (0 ... width - 1)] of each thread.

        The ref, in any memory, is not swizzled; it may be a slice of the first axes of an array. Numbers of a row are
        read 16 bytes at a time, so that `column` and `width` have to be multiples of as many, or the width smaller.
        """
        if self.interpret:
            down, across = step * jnp.arange(rows)[:, None], jnp.arange(width)
            found = ref[...][row[:, None, None] + down, column[:, None, None] + across]
            return [[found[:, i, j] for j in range(width)] for i in range(rows)]
        each, stride = min(width, 16 // ref.dtype.itemsize), ref.shape[-1]
        number = plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, PER_THREAD)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(()), PER_THREAD), return_type=(number,) * (rows * width))
        def go(_, ref, place):
            element, found = ir.MemRefType(ref.type).element_type, []
            base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [_element(place)], element)
            for i in range(rows):
                for j in range(0, width, each):
                    at = mgpu.utils.getelementptr(base, [step * i * stride + j], element)
                    words = llvm.load(_vector(ref, each), at)
                    found += [_number(vector.extract(words, [], [k]), number.dtype) for k in range(each)]
            return tuple(found)

        found = list(go(ref, row * stride + column))
        return [found[width * i : width * (i + 1)] for i in range(rows)]

    def of_products(self, x: jax.Array) -> list[list[list[jax.Array]]]:
        """Returns the numbers of each thread of 64 rows that tensor cores multiplied, [j][h][e].

        Thread 32 w + 4 g + q has columns 8 j + 2 q + e. Its rows are 16 w + g + 8 h.
        """
        groups = x.shape[1] // 8
        if self.interpret:
            y = x.reshape(4, 2, 8, groups, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(groups, 2, 2, THREADS)
            return [[list(some) for some in pair] for pair in y]
        number = plgpu.ShapeDtypeStruct((THREADS,), x.dtype, PER_THREAD)

        @plgpu.inline_mgpu(arg_types=(registers.TILE,), return_type=(number,) * (4 * groups))
        def numbers(_, x):
            pairs = x.registers.reshape(groups, 2)
            return tuple(_number(vector.extract(pair, [], [e]), number.dtype) for pair in pairs.flat for e in range(2))

        found = list(numbers(x))
        return [[found[4 * j + 2 * h :][:2] for h in range(2)] for j in range(groups)]

    def over_lanes(self, combine: Combine, x: jax.Array, count: int = 32) -> jax.Array:
        """Combines the numbers of every `count` neighboring threads, a power of two up to a warp's 32."""
        if self.interpret:
            folded = functools.reduce(combine, [x.reshape(-1, count)[:, k] for k in range(count)])
            return jnp.repeat(folded, count)
        number = plgpu.ShapeDtypeStruct((THREADS,), x.dtype, PER_THREAD)
        for k in range(count.bit_length() - 1):
            swap = lambda _, x, k=k: _number(mgpu.utils.shfl_bfly(_element(x), 1 << k), number.dtype)  # noqa: E731
            x = combine(x, plgpu.inline_mgpu(arg_types=(PER_THREAD,), return_type=number)(swap)(x))
        return x

    def over_threads(self, combine: Combine, values: list[jax.Array], memory: Any) -> list[jax.Array]:
        """Combines each of some numbers over all threads; `memory` is shared memory (warps, as many float32)."""
        values = [self.over_lanes(combine, x) for x in values]
        self.synchronize()
        for k, x in enumerate(values):
            self.poke(memory, self.thread >> 5, self.full(k, jnp.int32), [x], (self.thread & 31) == 0)
        self.synchronize()
        zero = self.full(0, jnp.int32)
        by_warp = self.block(memory, zero, zero, THREADS // 32, len(values))
        return [functools.reduce(combine, column) for column in zip(*by_warp, strict=True)]

    def synchronize(self) -> None:
        """Waits for all threads: values that one poked before, others may peek after."""
        if not self.interpret:
            plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def spread(rows: Rows, count: int) -> list[Spread]:
    """Columns of a matrix with `count` of them, one a thread at a time, and where there is one; None: everywhere.
    Other threads have the last."""
    thread = rows.thread
    whole = [(thread + start, None) for start in range(0, count - THREADS + 1, THREADS)]
    rest = thread + count // THREADS * THREADS
    return whole + ([(jnp.minimum(rest, count - 1), rest < count)] if count % THREADS else [])


def _columns(dim: int, dtype: Any) -> int:
    """Returns the columns of a block: 128, 64 or 32 bytes."""
    size = jnp.dtype(dtype).itemsize
    return swizzle_width(dim * size) // size


def _swizzle(columns: int, dtype: Any) -> tuple[Any, ...]:
    return (plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize),)


def _transforms(ref: Any) -> tuple[Any, ...]:
    """Returns the transforms of swizzled memory, or none for other memory."""
    return _swizzle(ref.shape[2], ref.dtype) if len(ref.shape) == 3 else ()


At: TypeAlias = tuple[int, int]


def swizzled_byte(row: Any, column: Any, at: At, tokens: int, width: int, itemsize: int) -> Any:
    """The byte where the number (row, column + offset) of swizzled memory in blocks of `width` bytes begins.

    Bits 4 to 6 of the address become themselves xor the bits 7 to 9, as many of them as `width` has chunks of 16 bytes.
    If the offset is whole blocks, or shares no bits with the column, it is put in last, so that the rest is computed
    once for all offsets.
    """
    offset, power = at
    late = offset * itemsize % width == 0 or (power and power * itemsize <= width)
    byte = (column if late else column + offset) * itemsize
    start = (row * width) ^ (((row * width >> 7) & (width // 16 - 1)) << 4)
    byte = (byte & -width) * tokens + (start ^ (byte & (width - 1)))
    if late:
        byte = (byte ^ offset * itemsize % width) + offset * itemsize // width * (tokens * width)
    return byte


def _byte(ref: Any, row: jax.Array, column: jax.Array, at: At) -> jax.Array:
    *_, rows, columns = ref.shape
    size = ref.dtype.itemsize
    if _transforms(ref):
        return swizzled_byte(row, column, at, rows, columns * size, size)
    return row * (columns * size) + (column + at[0]) * size


def _address(ref: ir.Value, byte: Any) -> ir.Value:
    i8 = ir.IntegerType.get_signless(8)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [_element(byte)], i8)


def _vector(ref: ir.Value, width: int) -> ir.Type:
    return ir.VectorType.get((width,), ir.MemRefType(ref.type).element_type)


def _element(x: Any) -> ir.Value:
    """The thread's number."""
    return vector.extract(x.registers.item(), [], [0])


def _number(value: ir.Value, dtype: Any) -> Any:
    word = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    return array([word], PER_THREAD, (THREADS,), is_signed=signed)
