"""Quantizers whose coordinates are whole levels in int8: products with them are taken in integers."""

import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Integer

from rqjax.core import Codes, Quantizer, TokenArray
from rqjax.core.products import times
from rqjax.scoring import integers, tiles
from rqjax.scoring.tiles import KeyTile, ValueTile


class Levels(Quantizer):
    """A quantizer with an index of each coordinate, of at most 8 bits, whose levels are whole numbers times a step."""

    bits: Any
    """Bits of an index."""

    def indices(self, codes: Codes) -> Integer[Array, "*n d"]:
        """Index of the level of each coordinate, from codes as `encode` returns them."""
        raise NotImplementedError

    def whole(self, indices: Integer[Array, "..."]) -> Int8[Array, "..."]:
        """Whole numbers of the levels of indices."""
        raise NotImplementedError

    @property
    def factor(self) -> Any:
        """Factor of the whole numbers."""
        return 1.0

    @property
    def in_integers(self) -> bool:
        return True

    @property
    def width(self) -> int:
        return 1 if self.in_integers else super().width

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        if not self.in_integers:
            return super().laid_out(codes, transposed)
        return tiles.tile(self.indices(codes), self.bits, transposed=transposed)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return integers.query_limbs(y) if self.in_integers else super().prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        if not self.in_integers:
            return super().scores(prepared, codes)
        return self.products(prepared, codes) * self.factor

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        if not self.in_integers:
            return super().weigh(w, codes)
        return integers.sums(w, self.value_levels(codes)) * self.factor

    def products(self, y: integers.Limbs, codes: Codes) -> Float[Array, "b h r t"]:
        """Inner products with whole numbers, of codes in a tile or as they are."""
        if isinstance(codes, ValueTile):
            return integers.row_products(y, self.value_levels(codes))
        return integers.products(y, self.key_levels(codes))

    def key_levels(self, codes: Codes) -> Int8[Array, "b h t d"]:
        if isinstance(codes, KeyTile):
            return self.whole(tiles.key_indices(codes.sections, self.bits))
        return self.whole(self.indices(codes).astype(jnp.uint8))

    def value_levels(self, codes: Codes) -> Int8[Array, "b h d t"]:
        if isinstance(codes, ValueTile):
            return self.whole(tiles.unpack_rows(codes.sections, self.bits, self.dim))
        return jnp.swapaxes(self.key_levels(codes), 2, 3)


class GroupedLevels(Levels):
    """`Levels` of groups of consecutive coordinates, scale * level + bias. Codes: (indices, an array (*n, groups) of
    each number that scales and biases are made of). In a tile these arrays are (b, h, groups, t)."""

    @property
    def groups(self) -> int:
        raise NotImplementedError

    def grid(self, *numbers: Array) -> tuple[Float[Array, "..."], Float[Array, "..."] | None]:
        """Scale and bias of levels, by the numbers that codes hold."""
        raise NotImplementedError

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        tile = tiles.tile(self.indices(codes), self.bits, transposed=transposed)
        return tile, *(TokenArray.of(jnp.swapaxes(a, 2, 3), axis=3) for a in codes[1:])

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        groups = y[:, :, None] * self._members
        return integers.query_limbs(_flat(groups)), groups.sum(-1)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        scale, bias = self._scale_and_bias(codes)
        found = self.products(prepared[0], self._of_products(codes))
        found = found.reshape(*prepared[1].shape, found.shape[-1]) * scale
        found = found if bias is None else found + prepared[1][..., None] * bias
        return functools.reduce(operator.add, [found[:, :, g] for g in range(found.shape[2])])  # no reduction

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        scale, bias = self._scale_and_bias(codes)
        if bias is not None:  # a bias that is not finite spoils sums by its scale, if its weight is not 0
            scale, bias = (jnp.where(jnp.isfinite(bias), x, other) for x, other in ((scale, jnp.nan), (bias, 0)))
        groups = times(w[:, :, None], scale)
        found = integers.sums(_flat(groups), self.value_levels(self._of_products(codes)))
        found = found.reshape(*groups.shape[:-1], self.dim)
        if bias is not None:
            shifts = jnp.einsum("bhrt,bhgt->bhgr", w, bias[:, :, :, 0], precision=lax.Precision.HIGHEST)
            found = found + shifts[..., None]
        return (found * self._members).sum(2)

    def _of_products(self, codes: Codes) -> Codes:
        """Codes that hold the indices: the tile, or all as `indices` takes it."""
        return codes[0] if isinstance(codes[0], KeyTile | ValueTile) else codes

    def _scale_and_bias(self, codes: Codes) -> tuple[Float[Array, "b h g 1 t"], Float[Array, "b h g 1 t"] | None]:
        laid_out = isinstance(codes[0], KeyTile | ValueTile)
        numbers = codes[1:] if laid_out else [jnp.swapaxes(a, 2, 3) for a in codes[1:]]
        return self.grid(*(a[:, :, :, None] for a in numbers))

    @property
    def _members(self) -> Float[Array, "groups 1 d"]:
        """Matrix of 1 where a coordinate belongs to a group. Groups are rows of one product: rows are cheap, slices are
        not."""
        return jnp.repeat(jnp.eye(self.groups, dtype=jnp.float32), self.dim // self.groups, axis=1)[:, None]


def _flat(x: Float[Array, "b h g r n"]) -> Float[Array, "b h rows n"]:
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])
