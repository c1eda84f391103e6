"""Realistic arguments of Hopper's `decode_attention` and the kernels around it, for tests that compile them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.attention_prologue import Exact
from pallas_kernels.gpu.columns import Lookup
from pallas_kernels.gpu.levels import PAGE
from pallas_kernels.gpu.positions import SPAN as POSITIONS, Angles
from pallas_kernels.gpu.rings import StateLevels
from pallas_kernels.gpu.turning import SPAN, Turning
from pallas_kernels.packed import WIDTHS, Packed


class Codes(NamedTuple):
    bits: float
    group: int | None = None
    """Dimensions that share a scale and a bias; None: levels, and one scale for the whole vector."""
    trellis: bool = False
    """True if levels are those of a trellis's states."""
    looked_up: int | None = None
    """Bytes of levels, where columns have bits and levels of their own; `bits` are their mean."""


class Shape(NamedTuple):
    dim: int
    rows: int
    keys: Codes
    values: Codes
    batch: int = 8
    heads: int = 8
    tokens: int = 8192
    paged: bool = False
    shifted: bool = False
    """True if the number added to a score differs from token to token."""
    apart: bool = False
    """True if queries are of several tokens, which see different ones."""
    turned: bool = False
    """True if codes are of keys before they turn."""
    latent: int = 0
    """Dimensions of a key before its value, if the value is a part of it."""

    def arguments(self) -> tuple[jax.ShapeDtypeStruct | Packed | Turning | None, ...]:
        """Shapes and dtypes of queries, keys, values, start, stop, shift, tables and turning."""
        stops = self.batch, self.rows if self.apart else 1
        bounds = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((self.batch,), stops)]
        columns = self.dim if self.keys.looked_up is None else self.dim + 1
        turning, dim = None, columns + self.latent
        if self.turned:
            half = self.dim // 2
            shapes = (self.dim, self.dim), (self.heads, self.dim, columns), (half,), (2, self.tokens // SPAN, half)
            turning, dim = Turning(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)), self.dim
        queries = jax.ShapeDtypeStruct((self.batch, self.heads, self.rows, dim), jnp.float32)
        rows = self.batch, self.heads, self.rows
        shift = jax.ShapeDtypeStruct((*rows, self.tokens), jnp.float32) if self.shifted else None
        tables = jax.ShapeDtypeStruct((self.batch, self.tokens // PAGE), jnp.int32) if self.paged else None
        of_keys = self._replace(dim=self.latent or self.dim)._packed(self.keys, transposed=self.latent > 0)
        codes = of_keys, self._packed(self.values, transposed=True)
        return queries, *codes, *bounds, shift, tables, turning

    def _packed(self, codes: Codes, *, transposed: bool) -> Packed:
        rooms, tokens = (self.batch * self.tokens // PAGE, PAGE) if self.paged else (self.batch, self.tokens)
        lead = rooms, self.heads

        def section(width: int) -> jax.ShapeDtypeStruct:
            rows = (self.dim * width // 8, tokens) if transposed else (tokens * width // 8, self.dim)
            return jax.ShapeDtypeStruct((*lead, *rows), jnp.uint8)

        groups = 1 if codes.group is None else self.dim // codes.group
        scales = jax.ShapeDtypeStruct((*lead, groups, tokens), jnp.bfloat16)
        levels = jax.ShapeDtypeStruct((2**codes.bits,), jnp.int8) if codes.group is None else None
        if codes.trellis or codes.looked_up is not None:
            stream = jax.ShapeDtypeStruct((*lead, int(self.dim * codes.bits) // 8, tokens), jnp.uint8)
            return Packed((stream,), scales, None, LEVELS if codes.trellis else self._lookup(codes))
        sections = tuple(map(section, WIDTHS[codes.bits]))
        return Packed(sections, scales, None if codes.group is None else scales, levels)

    def _lookup(self, codes: Codes) -> Lookup:
        columns = jax.ShapeDtypeStruct((self.dim,), jnp.int32)
        return Lookup(*[columns] * 3, jax.ShapeDtypeStruct((self.heads, codes.looked_up), jnp.int8))


LEVELS = StateLevels(tuple(range(-128, 128)))
"""Levels of a trellis; others compile to the same with other numbers."""
SHAPES = {
    "4 bits": Shape(128, 4, Codes(4), Codes(4)),
    "4 bits, 8 query heads": Shape(128, 8, Codes(4), Codes(4)),
    "2 bits": Shape(128, 4, Codes(2), Codes(2)),
    "3 and 2 bits": Shape(128, 4, Codes(3), Codes(2)),
    "affine groups": Shape(128, 8, Codes(4, 64), Codes(4, 64)),
    "affine, one group": Shape(128, 8, Codes(4, 128), Codes(4, 128)),
    "affine groups, 4 query heads": Shape(128, 4, Codes(4, 64), Codes(4, 64)),
    "16 query heads": Shape(128, 16, Codes(4), Codes(4)),
    "affine groups, 16 query heads": Shape(128, 16, Codes(4, 64), Codes(4, 64)),
    "trellis, 3 bits, 16 query heads": Shape(128, 16, Codes(3, trellis=True), Codes(3, trellis=True)),
    "columns, 16 query heads": Shape(128, 16, Codes(3, looked_up=1280), Codes(3, looked_up=1280)),
    "4 bits, pages, 4 query heads": Shape(128, 4, Codes(4), Codes(4), paged=True),
    "heads of 64": Shape(64, 8, Codes(4), Codes(4)),
    "heads of 64, 4 query heads": Shape(64, 4, Codes(4), Codes(4)),
    "heads of 256, 4 query heads": Shape(256, 4, Codes(4), Codes(4), heads=4),
    "heads of 256": Shape(256, 8, Codes(4), Codes(4), heads=4),
    "heads of 256, affine": Shape(256, 8, Codes(4, 64), Codes(4, 64), heads=4),
    "heads of 256, 16 queries of several tokens": Shape(256, 16, Codes(4), Codes(4), heads=1, apart=True),
    "trellis, 3 bits, 4 query heads": Shape(128, 4, Codes(3, trellis=True), Codes(3, trellis=True)),
    "trellis, 3 bits": Shape(128, 8, Codes(3, trellis=True), Codes(3, trellis=True)),
    "trellis, 2 bits, heads of 64": Shape(64, 8, Codes(2, trellis=True), Codes(2, trellis=True)),
    "trellis, 4 bits, heads of 256": Shape(256, 8, Codes(4, trellis=True), Codes(4, trellis=True), heads=4),
    "columns": Shape(128, 8, Codes(3, looked_up=1280), Codes(3, looked_up=1280)),
    "columns, odd rows": Shape(128, 8, Codes(3.125, looked_up=2304), Codes(3.125, looked_up=2304)),
    "columns, heads of 64": Shape(64, 8, Codes(2, looked_up=1280), Codes(2, looked_up=1280)),
    "columns, heads of 256": Shape(256, 8, Codes(4, looked_up=1792), Codes(4, looked_up=1792), heads=4),
    "columns, heads of 256, 16 query heads": Shape(
        256, 16, Codes(4.125, looked_up=4096), Codes(4.125, looked_up=4096), heads=1
    ),
    "4 bits, pages": Shape(128, 8, Codes(4), Codes(4), paged=True),
    "4 bits, pages, a mean that turns": Shape(128, 8, Codes(4), Codes(4), paged=True, shifted=True),
    "trellis, 3 bits, pages": Shape(128, 8, Codes(3, trellis=True), Codes(3, trellis=True), paged=True),
    "columns, 2 bits, turned, 4 query heads": Shape(
        128, 4, Codes(2, looked_up=1280), Codes(2, looked_up=1280), turned=True
    ),
    "columns, 2 bits, turned": Shape(128, 8, Codes(2, looked_up=1280), Codes(2, looked_up=1280), turned=True),
    "trellis, 3 bits, turned": Shape(128, 8, Codes(3, trellis=True), Codes(3, trellis=True), turned=True),
    "4 bits, turned": Shape(128, 8, Codes(4), Codes(4), turned=True),
    "latents": Shape(512, 16, Codes(4), Codes(4), heads=1, latent=64),
    "latents, 3 and 2 bits, pages": Shape(512, 16, Codes(3), Codes(2), heads=1, paged=True, latent=64),
    "latents, 128 query heads": Shape(512, 128, Codes(4), Codes(4), heads=1, latent=64),
    "columns, plain values": Shape(256, 8, Codes(4, looked_up=1792), Codes(4), heads=4),
}


class Around(NamedTuple):
    """A call of the kernels before and behind the one for codes."""

    dim: int
    each: int
    """Queries of a head."""
    columns: int
    """Columns of keys and of values."""
    dtype: str = "bfloat16"
    groups: int = 1
    mean: bool = False
    softcap: float | None = None
    slots: int = 148
    splits: int = 7
    batch: int = 8
    heads: int = 8
    turns: bool = False
    """True of queries of keys that turn."""
    spans: int = 0
    """Spans of tokens in codes, of queries and a mean that turn with positions."""

    def prologue(self) -> tuple[Any, ...]:
        """Shapes of queries, tokens in full precision, lengths, numbers held, matrices, scale, mean, angles."""
        exact = self._floats(self.batch, self.heads, self.slots, self.dim, dtype=self.dtype)
        lengths = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        groups = None if self.turns else self._floats(self.heads, self.groups, self.dim)
        matrices = self._floats(self.heads, self.dim, self.columns), groups
        mean = self._floats(self.batch, self.heads, self.dim) if self.mean else None
        q = self._floats(self.batch, 1, self.heads * self.each, self.dim, dtype=self.dtype)
        return (
            q,
            exact,
            exact,
            lengths,
            lengths,
            *matrices,
            self._floats(1),
            mean,
            self._angles() if self.spans else None,
        )

    def _angles(self) -> Angles:
        fast, terms = self.dim // 4, 9
        rows = self.spans, 4 + POSITIONS, 2 * fast + terms, self.dim - 2 * fast
        columns = self.dim, self.dim, POSITIONS, terms
        return Angles(*(self._floats(*shape) for shape in zip(rows, columns, strict=True)))

    def entering(self) -> tuple[Any, ...]:
        """Shapes of tokens in full precision, a new one, lengths, its count and numbers held."""
        exact = self._floats(self.batch, self.heads, self.slots, self.dim, dtype=self.dtype)
        new = self._floats(self.batch, self.heads, 1, self.dim)
        return exact, exact, new, new, *[jax.ShapeDtypeStruct((self.batch,), jnp.int32)] * 3

    def epilogue(self) -> tuple[Any, ...]:
        """Shapes of the sums of codes and of tokens in full precision, the matrix and the logits of sinks."""
        n, rows, padded = self.batch * self.heads, -(-self.each // 4) * 4, -(-self.each // 8) * 8
        numbers = self._floats(n, self.splits, padded)
        exact = self._floats(n, 3, rows)
        return (
            *(self._floats(n, self.splits, self.columns, padded), numbers, numbers),
            Exact(self._floats(n, 3, rows, self.dim), exact, exact),
            self._floats(self.heads, -(-self.columns // 32) * 32, self.dim),
            self._floats(self.heads * self.each),
        )

    def _floats(self, *shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


AROUND = {
    "heads of 128": Around(128, 4, 128),
    "heads of 64, a small window": Around(64, 3, 64, "float16", slots=34, mean=True),
    "heads of 256, 16 queries, float32": Around(256, 16, 256, "float32", groups=2, softcap=30.0, heads=1, splits=50),
    "columns": Around(128, 8, 192, mean=True),
    "keys that turn": Around(128, 8, 256, turns=True),
    "a mean that turns": Around(128, 4, 128, mean=True, spans=64),
}
