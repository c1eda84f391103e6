"""Realistic uses of the kernels for TPUs, for tests that compile them."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.packed import WIDTHS, Packed
from pallas_kernels.tpu import vectors
from pallas_kernels.tpu.decode_attention import PAGE, decode_attention, pages_of_step

Configuration: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and the shapes of its arguments."""


class Codes(NamedTuple):
    bits: int
    group: int | None = None
    """Dimensions that share a scale and a bias; None: levels, and one scale for the whole vector."""


class Attention(NamedTuple):
    keys: Codes
    values: Codes
    dim: int = 128
    rows: int = 8
    heads: int = 8
    batch: int = 8
    tokens: int = 8192
    paged: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Shapes of queries, keys, values, start, stop, shift and tables."""
        bound = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        queries = jax.ShapeDtypeStruct((self.batch, self.heads, self.rows, self.dim), jnp.float32)
        tables = jax.ShapeDtypeStruct((self.batch, self.tokens // PAGE), jnp.int32) if self.paged else None
        keys, values = self._packed(self.keys, transposed=False), self._packed(self.values, transposed=True)
        return queries, keys, values, bound, bound, None, tables

    @property
    def code_bytes(self) -> int:
        """Bytes of codes and scales that the kernel reads."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.arguments()[1:3]))

    @property
    def steps(self) -> int:
        """Steps of the grid for a sequence."""
        count = self.tokens // PAGE
        page_bytes = self.heads * PAGE * self.dim * (self.keys.bits + self.values.bits) // 8
        return -(-count // pages_of_step(count, page_bytes))

    def _packed(self, codes: Codes, *, transposed: bool) -> Packed:
        rooms, tokens = (self.batch * self.tokens // PAGE, PAGE) if self.paged else (self.batch, self.tokens)

        def section(width: int) -> jax.ShapeDtypeStruct:
            rows = (self.dim * width // 8, tokens) if transposed else (tokens * width // 8, self.dim)
            return jax.ShapeDtypeStruct((rooms, self.heads, *rows), jnp.uint8)

        groups = 1 if codes.group is None else self.dim // codes.group
        scales = jax.ShapeDtypeStruct((rooms, self.heads, groups, tokens), jnp.bfloat16)
        levels = jax.ShapeDtypeStruct((2**codes.bits,), jnp.int8) if codes.group is None else None
        return Packed(tuple(map(section, WIDTHS[codes.bits])), scales, None if levels is not None else scales, levels)


def attend(y: Any, keys: Packed, values: Packed, start: Any, stop: Any, shift: Any, tables: Any) -> Any:
    return decode_attention(y, keys, values, start, stop, shift, tables=tables)


ATTENTION = {
    "2 bits": Attention(Codes(2), Codes(2)),
    "3 bits": Attention(Codes(3), Codes(3)),
    "4 bits": Attention(Codes(4), Codes(4)),
    "4 bits, affine, one group": Attention(Codes(4, 128), Codes(4, 128)),
    "4 bits, affine, groups of 64": Attention(Codes(4, 64), Codes(4, 64)),
    "1 bit, 4 bits, 16 query heads": Attention(Codes(1), Codes(4), rows=16),
    "4 bits, pages": Attention(Codes(4), Codes(4), paged=True),
    "4 bits, affine, one group, pages": Attention(Codes(4, 128), Codes(4, 128), paged=True),
    "3 bits, 2 bits, heads of 64, pages": Attention(Codes(3), Codes(2), dim=64, paged=True),
    "4 bits, heads of 256": Attention(Codes(4), Codes(4), dim=256, heads=4),
    "3 bits, heads of 256, 32 of them": Attention(Codes(3), Codes(3), dim=256, heads=32, batch=1),
}
N = 65536
"""Number of vectors."""


def _vectors(name: str, dim: int, bits: int, mode: str | None = None, dtype: str = "float32") -> Configuration:
    plan = vectors.Plan(bits, mode)
    x, norm = jax.ShapeDtypeStruct((N, dim), jnp.dtype(dtype)), jax.ShapeDtypeStruct((N,), jnp.bfloat16)
    words = jax.ShapeDtypeStruct((N, dim * bits // 32), jnp.uint32)
    rest = jax.ShapeDtypeStruct((dim, dim), jnp.float32), jax.ShapeDtypeStruct((2**bits,), jnp.float32)
    if name == "decode":
        run = lambda *a: vectors.decode(*a, plan, dtype=dtype, interpret=False)  # noqa: E731
        return run, (norm, words, *rest)
    return (lambda *a: getattr(vectors, name)(*a, plan, interpret=False)), (x, *rest)


CONFIGURATIONS: dict[str, Callable[[], Configuration]] = {
    **{f"attention, {name}": lambda shape=shape: (attend, shape.arguments()) for name, shape in ATTENTION.items()},
    "encode, 4 bits": lambda: _vectors("encode", 128, 4),
    "encode, 3 bits, bfloat16": lambda: _vectors("encode", 128, 3, dtype="bfloat16"),
    "encode, EDEN, 4 bits": lambda: _vectors("encode", 128, 4, "mse"),
    "encode, 2 bits, d = 64": lambda: _vectors("encode", 64, 2),
    "encode, 4 bits, d = 512": lambda: _vectors("encode", 512, 4),
    "decode, 3 bits": lambda: _vectors("decode", 128, 3),
    "decode, 4 bits, d = 256": lambda: _vectors("decode", 256, 4),
    "decode, 1 bit, d = 192": lambda: _vectors("decode", 192, 1),
    "roundtrip, 4 bits": lambda: _vectors("roundtrip", 128, 4),
}
