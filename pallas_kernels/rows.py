"""Tiles of tokens in which every thread works on one token, or on a part of one: norms, rotations and packing then need
no exchange between threads, whatever the dimension.

To Pallas a number per thread is an array of shape (128,), the threads of a warpgroup. What Pallas cannot express, a
thread's own place in memory, is written in Mosaic's operations, beside its plain form for the interpreter.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm, vector
from jax._src.state import indexing
from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS = 128
PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


class Rows(NamedTuple):
    """How the threads share a tile: thread t has token t % tokens of the tile and part t // tokens of it."""

    tokens: int
    interpret: bool

    @property
    def parts(self) -> int:
        """Threads that work on one token."""
        return THREADS // self.tokens

    @property
    def thread(self) -> jax.Array:
        if self.interpret:
            return jnp.arange(THREADS, dtype=jnp.int32)
        return plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=PER_THREAD)

    @property
    def token(self) -> jax.Array:
        return self.thread & (self.tokens - 1)

    @property
    def part(self) -> jax.Array:
        return self.thread >> (self.tokens.bit_length() - 1)

    def full(self, value: Any, dtype: Any = jnp.float32) -> jax.Array:
        x = jnp.full((THREADS,), value, dtype)
        return x if self.interpret else plgpu.layout_cast(x, PER_THREAD)

    def peek(self, ref: Any, row: jax.Array, column: jax.Array, width: int = 1, at: "At" = (0, 0)) -> list[jax.Array]:
        """The numbers ref[row, column + offset + (0 ... width - 1)] of each thread, of `swizzled` memory as of other.

        `at` is the offset and, if that is a multiple of a power of two below which the columns are, the power, else 0:
        then most of the address does not depend on the offset.
        """
        if self.interpret:
            found = ref[...][row[:, None], (column + at[0])[:, None] + jnp.arange(width)]
            return [found[:, i] for i in range(width)]
        transforms = _transforms(ref)
        number = plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, PER_THREAD)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), PER_THREAD, PER_THREAD), return_type=(number,) * width)
        def go(_, ref, row, column):
            words = llvm.load(_vector(ref, width), _address(ref, bool(transforms), row, column, at))
            return tuple(_number(vector.extract(words, [], [i]), row, number.dtype) for i in range(width))

        return list(go(ref, row, column))

    def poke(
        self,
        ref: Any,
        row: jax.Array,
        column: jax.Array,
        values: list[jax.Array],
        where: jax.Array | None = None,
        at: "At" = (0, 0),
    ) -> None:
        """Writes the numbers that `peek` would read, `where` given only those of these threads."""
        if self.interpret:
            place = row[:, None], (column + at[0])[:, None] + jnp.arange(len(values))
            if where is not None:
                place = jnp.where(where[:, None], place[0], ref.shape[0]), place[1]
            ref[...] = ref[...].at[place].set(jnp.stack(values, axis=1), mode="drop")
            return
        transforms = _transforms(ref)
        mask = () if where is None else (where.astype(jnp.int32),)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), *(PER_THREAD,) * (2 + len(mask) + len(values))))
        def go(_, ref, row, column, *numbers):
            def store():
                words = vector.from_elements(_vector(ref, len(values)), [_element(x) for x in numbers[len(mask) :]])
                llvm.store(words, _address(ref, bool(transforms), row, column, at))

            if not mask:
                return store()
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, _element(numbers[0]), _i32(0))):
                store()

        go(ref, row, column, *mask, *values)

    def synchronize(self) -> None:
        """What a thread poked others may peek after this."""
        if not self.interpret:
            plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()


def swizzled(tokens: int, dim: int, dtype: Any) -> Any:
    """Shared memory (tokens, dim) in which 8 threads read 16 bytes of 8 rows each without a bank conflict."""
    return plgpu.SMEM((tokens, dim), dtype, transforms=_swizzle(dim, dtype))


def _swizzle(dim: int, dtype: Any) -> tuple[Any, ...]:
    size = jnp.dtype(dtype).itemsize
    width = next(width for width in (128, 64, 32) if dim * size % width == 0)
    return plgpu.TilingTransform((8, width // size)), plgpu.SwizzleTransform(width)


def _transforms(ref: Any) -> tuple[Any, ...]:
    """Those of `swizzled` memory, none of other memory."""
    seen = getattr(ref, "transforms", ())
    return () if all(isinstance(t, indexing.NDIndexer) for t in seen) else _swizzle(ref.shape[1], ref.dtype)


At: TypeAlias = tuple[int, int]


def _address(ref: ir.Value, is_swizzled: bool, row: Any, column: Any, at: At) -> ir.Value:
    """Where ref[row, column + offset] is.

    Swizzled memory is (rows / 8, columns / w, 8, w), w 32, 64 or 128 bytes, in which the 16-byte chunks of a row of w
    are exchanged: the number of the chunk is taken xor that of the 128-byte line.
    """
    row, column, (offset, power) = _element(row), _element(column), at
    kind, (strides, _) = ir.MemRefType(ref.type), ir.MemRefType(ref.type).get_strides_and_offset()
    size = mgpu.utils.bitwidth(kind.element_type) // 8
    if not is_swizzled:
        place = [row, arith.addi(column, _i32(offset))]
    else:
        width = kind.shape[3]
        lines = 128 // (width * size)
        line = arith.divui(arith.remui(row, _i32(8)), _i32(lines))
        exchange = arith.muli(line, _i32(16 // size))
        if power and power <= width:  # the bits of the column and those of the offset are not the same
            block = _i32(offset // width)
            inside = arith.xori(arith.xori(column, exchange), _i32(offset % width))
        else:
            column = arith.addi(column, _i32(offset))
            block, inside = arith.divui(column, _i32(width)), arith.xori(arith.remui(column, _i32(width)), exchange)
        place = [arith.divui(row, _i32(8)), block, arith.remui(row, _i32(8)), inside]
    terms = [i if s == 1 else arith.muli(i, _i32(s)) for i, s in zip(place, strides, strict=True)]
    # The part that no offset changes comes first.
    terms = sorted(terms, key=lambda term: term is terms[1])
    return mgpu.utils.getelementptr(
        mgpu.utils.memref_ptr(ref), [functools.reduce(arith.addi, terms)], kind.element_type
    )


def _vector(ref: ir.Value, width: int) -> ir.Type:
    return ir.VectorType.get((width,), ir.MemRefType(ref.type).element_type)


def _i32(value: int | None = None) -> Any:
    kind = ir.IntegerType.get_signless(32)
    return kind if value is None else arith.constant(kind, ir.IntegerAttr.get(kind, value))


def _element(x: Any) -> ir.Value:
    """The thread's number."""
    return vector.extract(x.registers.item(), [], [0])


def _number(value: ir.Value, like: Any, dtype: Any) -> Any:
    registers = np.array([vector.broadcast(ir.VectorType.get((1,), value.type), value)], dtype=object)
    signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=signed)
