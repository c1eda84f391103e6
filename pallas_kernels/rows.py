"""Tiles of tokens in which every thread works on one token, or on a part of one: norms, rotations and packing then need
no exchange between threads, whatever the dimension.

To Pallas a number per thread is an array of shape (128,), the threads of a warpgroup. What Pallas cannot express, a
thread's own place in memory, is written in Mosaic's operations, beside its plain form for the interpreter.
"""

import functools
from typing import Any, NamedTuple

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

    def peek(self, ref: Any, row: jax.Array, column: jax.Array, width: int = 1) -> list[jax.Array]:
        """The numbers ref[row, column + (0 ... width - 1)] of each thread; a row of `swizzled` memory as any other."""
        if self.interpret:
            found = ref[...][row[:, None], column[:, None] + jnp.arange(width)]
            return [found[:, i] for i in range(width)]
        transforms = _transforms(ref)
        number = plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, PER_THREAD)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), PER_THREAD, PER_THREAD), return_type=(number,) * width)
        def go(_, ref, row, column):
            words = llvm.load(_vector(ref, width), _address(ref, bool(transforms), row, column))
            return tuple(_number(vector.extract(words, [], [i]), row, number.dtype) for i in range(width))

        return list(go(ref, row, column))

    def poke(
        self, ref: Any, row: jax.Array, column: jax.Array, values: list[jax.Array], where: jax.Array | None = None
    ) -> None:
        """Writes ref[row, column + (0 ... len(values) - 1)] of each thread, `where` given only of those."""
        if self.interpret:
            at = row[:, None], column[:, None] + jnp.arange(len(values))
            if where is not None:
                at = jnp.where(where[:, None], at[0], ref.shape[0]), at[1]
            ref[...] = ref[...].at[at].set(jnp.stack(values, axis=1), mode="drop")
            return
        transforms = _transforms(ref)
        where = jnp.ones(1, jnp.int32)[0] + row * 0 if where is None else where.astype(jnp.int32)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), *(PER_THREAD,) * (3 + len(values))))
        def go(_, ref, row, column, where, *values):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ne, _element(where), mgpu.utils.c(0, _element(where).type))):
                words = vector.from_elements(_vector(ref, len(values)), [_element(value) for value in values])
                llvm.store(words, _address(ref, bool(transforms), row, column))

        go(ref, row, column, where, *values)

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


def _address(ref: ir.Value, is_swizzled: bool, row: Any, column: Any) -> ir.Value:
    """Where ref[row, column] is.

    Swizzled memory is (rows / 8, columns / w, 8, w), w 32, 64 or 128 bytes, in which the 16-byte chunks of a row of w
    are exchanged: the number of the chunk is taken xor that of the 128-byte line.
    """
    row, column = _element(row), _element(column)
    type_, (strides, _) = ir.MemRefType(ref.type), ir.MemRefType(ref.type).get_strides_and_offset()
    size = mgpu.utils.bitwidth(type_.element_type) // 8

    def dot(indices, strides):
        terms = [i if s == 1 else arith.muli(i, _i32(s)) for i, s in zip(indices, strides, strict=True)]
        return functools.reduce(arith.addi, terms)

    if is_swizzled:
        width = type_.shape[3]
        place = arith.divui(row, _i32(8)), arith.divui(column, _i32(width))
        place += arith.remui(row, _i32(8)), arith.remui(column, _i32(width))
        offset = dot(place, strides)
        chunk, line = 16 // size, 128 // size
        exchange = arith.andi(arith.divui(offset, _i32(line)), _i32(width * size // 16 - 1))
        offset = arith.xori(offset, arith.muli(exchange, _i32(chunk)))
    else:
        offset = dot((row, column), strides)
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], type_.element_type)


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
