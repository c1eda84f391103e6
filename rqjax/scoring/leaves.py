"""The rules of leaves: products with levels in int8, and with centroids."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, UInt8

from rqjax.arrays import packing
from rqjax.arrays.levels import look_up
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes
from rqjax.quantizers.affine import Affine, MinMax
from rqjax.quantizers.block_formats import FORMATS, Blocks
from rqjax.quantizers.exact import Exact
from rqjax.quantizers.product import Product
from rqjax.quantizers.scalar import Scalar
from rqjax.scoring import integers, tiles
from rqjax.scoring.rules import DECODED, RULES, Rule
from rqjax.scoring.tiles import TokenArray


class Grid(NamedTuple):
    """Scales and biases that codes hold, of groups of consecutive coordinates."""

    groups: Callable[[Any], int]
    arrays: Callable[[Any, Codes], tuple[Array, ...]]
    """Those of codes, (*n, groups) each."""
    numbers: Callable[..., tuple[Array, Array | None]]
    """Scale and bias of levels, of the quantizer and the arrays."""


def of_levels(
    levels: Callable[[Any, UInt8[Array, "..."]], Int8[Array, "..."]],
    *,
    step: Callable[[Any], Any] = lambda quantizer: 1.0,
    grid: Grid | None = None,
) -> Rule:
    """The rule of a leaf: a quantizer with `bits`, at most 8, and `indices(codes)`, an index of each coordinate.

    Args:
      levels: the level of each index, a whole number in int8.
      step: by which levels are multiplied.
      grid: if the codes hold scales and biases: a coordinate is scale * level + bias.
    """

    def lay_out(quantizer: Any, codes: Codes, transposed: bool) -> Codes:
        tile = tiles.tile(quantizer.indices(codes), quantizer.bits, transposed=transposed)
        if grid is None:
            return tile
        return tile, *(TokenArray.of(jnp.swapaxes(a, 2, 3), axis=3) for a in grid.arrays(quantizer, codes))

    def key_levels(quantizer: Any, codes: Codes) -> Int8[Array, "b h t d"]:
        tile = codes if grid is None else codes[0]
        if isinstance(tile, tuple):
            return levels(quantizer, tiles.key_indices(tile, quantizer.bits))
        return levels(quantizer, quantizer.indices(codes).astype(jnp.uint8))

    def value_levels(quantizer: Any, codes: Codes) -> Int8[Array, "b h d t"]:
        tile = codes if grid is None else codes[0]
        if isinstance(tile, tuple):
            return levels(quantizer, tiles.unpack_rows(tile, quantizer.bits, quantizer.dim))
        return jnp.swapaxes(key_levels(quantizer, codes), 2, 3)

    def products(quantizer: Any, y: integers.Limbs, codes: Codes, transposed: bool) -> Float[Array, "b h r t"]:
        if transposed:
            return integers.row_products(y, value_levels(quantizer, codes))
        return integers.products(y, key_levels(quantizer, codes))

    if grid is None:
        return Rule(
            prepare=lambda quantizer, y: integers.query_limbs(y),
            scores=lambda quantizer, y, codes, transposed: products(quantizer, y, codes, transposed) * step(quantizer),
            weigh=lambda quantizer, w, codes: integers.sums(w, value_levels(quantizer, codes)) * step(quantizer),
            lay_out=lay_out,
            in_integers=lambda quantizer: True,
            width=lambda quantizer: 1,
        )

    def numbers(quantizer: Any, codes: Codes) -> tuple[Float[Array, "b h g 1 t"], Float[Array, "b h g 1 t"] | None]:
        laid_out = isinstance(codes[0], tuple)
        arrays = codes[1:] if laid_out else [jnp.swapaxes(a, 2, 3) for a in grid.arrays(quantizer, codes)]
        return grid.numbers(quantizer, *(a[:, :, :, None] for a in arrays))

    def members(quantizer: Any) -> Float[Array, "groups 1 d"]:
        """1 where a coordinate belongs to a group. Groups are rows of one product: rows are cheap, slices are not."""
        groups = grid.groups(quantizer)
        return jnp.repeat(jnp.eye(groups), quantizer.dim // groups, axis=1)[:, None]

    def flat(x: Float[Array, "b h g r n"]) -> Float[Array, "b h rows n"]:
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def prepare(quantizer: Any, y: Float[Array, "b h r d"]) -> tuple[Any, Float[Array, "b h g r"]]:
        groups = y[:, :, None] * members(quantizer)
        return integers.query_limbs(flat(groups)), groups.sum(-1)

    def scores(quantizer: Any, prepared: Any, codes: Codes, transposed: bool) -> Float[Array, "b h r t"]:
        scale, bias = numbers(quantizer, codes)
        found = products(quantizer, prepared[0], codes, transposed)
        found = found.reshape(*prepared[1].shape, -1) * scale
        found = found if bias is None else found + prepared[1][..., None] * bias
        return functools.reduce(operator.add, [found[:, :, g] for g in range(found.shape[2])])  # no reduction

    def weigh(quantizer: Any, w: Float[Array, "b h r t"], codes: Codes) -> Float[Array, "b h r d"]:
        scale, bias = numbers(quantizer, codes)
        if bias is not None:  # a bias that is not finite spoils the sums that it counts in by its scale
            scale, bias = (jnp.where(jnp.isfinite(bias), x, other) for x, other in ((scale, jnp.nan), (bias, 0)))
        groups = integers.times(w[:, :, None], scale)
        found = integers.sums(flat(groups), value_levels(quantizer, codes))
        found = found.reshape(*groups.shape[:-1], quantizer.dim)
        if bias is not None:
            shifts = jnp.einsum("bhrt,bhgt->bhgr", w, bias[:, :, :, 0], precision=lax.Precision.HIGHEST)
            found = found + shifts[..., None]
        return (found * members(quantizer)).sum(2)

    return Rule(prepare, scores, weigh, lay_out=lay_out, in_integers=lambda quantizer: True, width=lambda quantizer: 1)


RULES[Exact] = Rule(
    scores=lambda q, y, codes, transposed: integers.full_precision_einsum("bhrd,bhtd->bhrt", y, codes),
    weigh=lambda q, w, codes: integers.weighted_sums(w, codes),
    # float32 is multiplied where it lies, in one block if that holds the scores; the bits of bfloat16 become bfloat16
    # by a copy, which is to stay in the processor's cache
    width=lambda q: 0 if q.dtype == "float32" else 8,
)
RULES[Product] = Rule(
    prepare=lambda q, y: jax.vmap(jax.vmap(q.tables))(y),
    scores=lambda q, tables, codes, transposed: jax.vmap(jax.vmap(q.looked_up))(tables, codes),
)

_LEVELS = of_levels(
    lambda q, indices: look_up(indices, jnp.asarray(q.levels), symmetric=q.symmetric), step=lambda q: q.step
)


def _scalar_scores(quantizer: Scalar, y: integers.Limbs, codes: Codes, transposed: bool) -> Float[Array, "b h r t"]:
    """Whole words are unpacked in the order in which indices lie in their bytes, if bytes hold whole indices; else a
    look-up of 32 bits is as fast as selections."""
    if isinstance(codes, tuple):
        return _LEVELS.scores(quantizer, y, codes, transposed)
    order = packing.octet_order(quantizer.dim, quantizer.bits)
    if order is None:
        levels = jnp.asarray(quantizer.levels)[quantizer.indices(codes)]
    else:
        y = (y[0][..., order], y[1]) if isinstance(y, tuple) else y[..., order]
        indices = packing.unpack_octets(codes, quantizer.bits)
        levels = look_up(indices, jnp.asarray(quantizer.levels), symmetric=quantizer.symmetric)
    return integers.products(y, levels) * quantizer.step


_SCALAR = _LEVELS._replace(scores=_scalar_scores)
RULES[Scalar] = lambda q: _SCALAR if q.levels.dtype == jnp.int8 and q.bits <= 4 else DECODED
_AFFINE = of_levels(
    # centered, so that 8 bits fit and scale and bias do not cancel
    lambda q, indices: lax.bitcast_convert_type(indices - jnp.uint8(2 ** (q.bits - 1)), jnp.int8),
    grid=Grid(
        groups=lambda q: q.dim // q.group_size,
        arrays=lambda q, codes: codes[1:],
        numbers=lambda q, scale, bias: (as_float32(scale), as_float32(bias) + 2 ** (q.bits - 1) * as_float32(scale)),
    ),
)
RULES[MinMax] = _AFFINE
RULES[Affine] = lambda q: (
    _AFFINE._replace(lay_out=DECODED.lay_out, weigh=DECODED.weigh, width=DECODED.width) if q.keeps_words else _AFFINE
)
RULES[Blocks] = of_levels(
    lambda q, indices: look_up(indices, jnp.asarray(FORMATS[q.format].levels)),
    grid=Grid(
        groups=lambda q: q.dim // q.size,
        arrays=lambda q, codes: codes[1:],
        numbers=lambda q, scale: (q.scales(scale), None),
    ),
)
