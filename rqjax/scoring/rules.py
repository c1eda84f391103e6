"""What caches and indexes need of a quantizer, one rule a class: products with codes, and their layout in a cache.

    scores(q, prepare(q, y), keys)      == y @ decode(keys).T
    restore(q, weigh(q, w, values))     == w @ decode(values)

Queries are rotated once in `prepare`, sums are rotated back once in `restore`; no vector is ever decoded. What a
combinator does to vectors its rule does to queries, scores, weights and sums. Levels meet queries and weights that are
split into int8 limbs; scales and biases are folded into scores and weights. Codes are as a cache
lays them out (`tiles`), or as `encode` returns them.

Shapes: queries y (batch, heads, rows, d), weights w (batch, heads, rows, tokens).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, UInt8

from rqjax.arrays import packing
from rqjax.arrays.blocks import inner
from rqjax.arrays.levels import look_up
from rqjax.arrays.planes import as_float32
from rqjax.core.dispatch import operation
from rqjax.core.quantizer import Codes, Quantizer
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
from rqjax.quantizers.exact import Exact
from rqjax.quantizers.gain import Gain, stored_gain
from rqjax.quantizers.per_head import PerHead, over_heads
from rqjax.quantizers.product import Product
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis
from rqjax.scoring import integers, tiles
from rqjax.scoring.tiles import TokenArray


def _as_encoded(quantizer: Quantizer, codes: Codes, transposed: bool) -> Codes:
    return jax.tree.map(lambda leaf: TokenArray.of(leaf, axis=2), codes)


def _decoded_scores(quantizer: Quantizer, y: Float[Array, "b h r d"], codes: Codes) -> Float[Array, "b h r t"]:
    return jax.vmap(jax.vmap(quantizer.dot))(y, codes)


def _decoded_sums(quantizer: Quantizer, w: Float[Array, "b h r t"], codes: Codes) -> Float[Array, "b h r d"]:
    return integers.full_precision_einsum("bhrt,bhtd->bhrd", w, quantizer.decode(codes))


class Rule(NamedTuple):
    """What is done for the quantizers of a class; the defaults decode a block of codes as they are.

    That is the best there is where each coordinate has levels in float of its own (`Columns`, `TrellisColumns`,
    `Uniform` with a grid of each column), a center of its own (`Local`) or another place in each vector (`Exchange`).
    """

    prepare: Callable[[Any, Array], Any] = lambda quantizer, y: y
    """What `scores` needs of the queries."""
    scores: Callable[[Any, Any, Codes], Array] = _decoded_scores
    """Inner products of the queries with the keys behind codes."""
    weigh: Callable[[Any, Array, Codes], Any] = _decoded_sums
    """Sums of the values behind codes, not yet rotated back; sums may be added."""
    restore: Callable[[Any, Any], Array] = lambda quantizer, sums: sums
    """What `weigh` sums, rotated back."""
    lay_out: Callable[[Any, Codes, bool], Codes] = _as_encoded
    """Codes of (batch, heads, tokens) vectors as a cache stores them, each array as a `TokenArray`."""
    in_integers: Callable[[Any], bool] = lambda quantizer: False
    """Whether products are taken with levels in int8 and nothing is decoded."""


DECODED = Rule()
RULES: dict[type, Rule | Callable[[Any], Rule]] = {}
"""By class; a function where it depends on the quantizer which rule it has. `DECODED` serves all others."""


def rule(quantizer: Quantizer) -> Rule:
    found = RULES.get(type(quantizer), DECODED)
    return found if isinstance(found, Rule) else found(quantizer)


@operation
def prepare(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Any:
    """What `scores` needs of the queries."""
    return rule(quantizer).prepare(quantizer, y)


@operation
def scores(quantizer: Quantizer, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
    """Inner products of the queries with the keys behind `codes`."""
    return rule(quantizer).scores(quantizer, prepared, codes)


@operation
def weigh(quantizer: Quantizer, w: Float[Array, "b h r t"], codes: Codes) -> Any:
    """Sums of the values behind `codes`, `integers.TOKENS` at most, with weights w, not yet rotated back."""
    return rule(quantizer).weigh(quantizer, w, codes)


def restore(quantizer: Quantizer, sums: Any) -> Float[Array, "b h r d"]:
    """What `weigh` sums, rotated back."""
    return rule(quantizer).restore(quantizer, sums)


def lay_out(quantizer: Quantizer, codes: Codes, *, transposed: bool) -> Codes:
    """Codes of (batch, heads, tokens) vectors, a multiple of `tiles.UNIT` tokens, in the layout of keys or of values.

    The nest stays that of the codes; each array becomes a `TokenArray`.
    """
    return rule(quantizer).lay_out(quantizer, codes, transposed)


def in_integers(quantizer: Quantizer) -> bool:
    """Whether products with the codes of a quantizer are taken with levels in int8, without decoding."""
    return rule(quantizer).in_integers(quantizer)


class Grid(NamedTuple):
    """Scales and biases that codes hold, of groups of consecutive coordinates."""

    groups: Callable[[Any], int]
    arrays: Callable[[Any, Codes], tuple[Array, ...]]
    """Those of codes, (*n, groups) each."""
    numbers: Callable[..., tuple[Array, Array | None]]
    """Scale and bias of levels, of the quantizer and the arrays in float32."""


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

    if grid is None:
        return Rule(
            prepare=lambda quantizer, y: integers.query_limbs(y),
            scores=lambda quantizer, y, codes: integers.products(y, key_levels(quantizer, codes)) * step(quantizer),
            weigh=lambda quantizer, w, codes: integers.sums(w, value_levels(quantizer, codes)) * step(quantizer),
            lay_out=lay_out,
            in_integers=lambda quantizer: True,
        )

    def numbers(quantizer: Any, codes: Codes) -> tuple[Float[Array, "b h g 1 t"], Float[Array, "b h g 1 t"] | None]:
        laid_out = isinstance(codes[0], tuple)
        arrays = codes[1:] if laid_out else [jnp.swapaxes(a, 2, 3) for a in grid.arrays(quantizer, codes)]
        return grid.numbers(quantizer, *(as_float32(a)[:, :, :, None] for a in arrays))

    def members(quantizer: Any) -> Float[Array, "groups 1 d"]:
        """1 where a coordinate belongs to a group. Groups are rows of one product: rows are cheap, slices are not."""
        groups = grid.groups(quantizer)
        return jnp.repeat(jnp.eye(groups), quantizer.dim // groups, axis=1)[:, None]

    def flat(x: Float[Array, "b h g r n"]) -> Float[Array, "b h rows n"]:
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def prepare(quantizer: Any, y: Float[Array, "b h r d"]) -> tuple[Any, Float[Array, "b h g r"]]:
        groups = y[:, :, None] * members(quantizer)
        return integers.query_limbs(flat(groups)), groups.sum(-1)

    def scores(quantizer: Any, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        scale, bias = numbers(quantizer, codes)
        found = integers.products(prepared[0], key_levels(quantizer, codes))
        found = found.reshape(*prepared[1].shape, -1) * scale
        found = found if bias is None else found + prepared[1][..., None] * bias
        return functools.reduce(operator.add, [found[:, :, g] for g in range(found.shape[2])])  # no reduction

    def weigh(quantizer: Any, w: Float[Array, "b h r t"], codes: Codes) -> Float[Array, "b h r d"]:
        scale, bias = numbers(quantizer, codes)
        groups = w[:, :, None] * scale
        found = integers.sums(flat(groups), value_levels(quantizer, codes))
        found = found.reshape(*groups.shape[:-1], quantizer.dim)
        if bias is not None:
            shifts = jnp.einsum("bhrt,bhgt->bhgr", w, bias[:, :, :, 0], precision=lax.Precision.HIGHEST)
            found = found + shifts[..., None]
        return (found * members(quantizer)).sum(2)

    return Rule(prepare, scores, weigh, lay_out=lay_out, in_integers=lambda quantizer: True)


def of_factors(factors: Callable[[Codes], Array]) -> Rule:
    """The rule of a combinator that multiplies what its `inner` decodes by a number of each vector, the first of its
    codes."""
    return Rule(
        prepare=lambda q, y: prepare(q.inner, y),
        scores=lambda q, y, codes: scores(q.inner, y, codes[1]) * factors(codes)[:, :, None],
        weigh=lambda q, w, codes: weigh(q.inner, w * factors(codes)[:, :, None], codes[1]),
        restore=lambda q, sums: restore(q.inner, sums),
        lay_out=lambda q, codes, transposed: (
            TokenArray.of(codes[0], axis=2),
            lay_out(q.inner, codes[1], transposed=transposed),
        ),
        in_integers=lambda q: in_integers(q.inner),
    )


RULES[Normalized] = RULES[Scaled] = of_factors(lambda codes: as_float32(codes[0]))
RULES[Gain] = of_factors(stored_gain)
RULES[Rotated] = Rule(
    prepare=lambda q, y: prepare(q.inner, q.rotation(y)),  # <y, R^T x> = <R y, x>
    scores=lambda q, y, codes: scores(q.inner, y, codes),
    weigh=lambda q, w, codes: weigh(q.inner, w, codes),
    restore=lambda q, sums: q.rotation.inverse(restore(q.inner, sums)),
    lay_out=lambda q, codes, transposed: lay_out(q.inner, codes, transposed=transposed),
    in_integers=lambda q: in_integers(q.inner),
)
RULES[Centered] = Rule(
    prepare=lambda q, y: (inner(y, q.mean)[..., None], prepare(q.inner, y)),
    scores=lambda q, y, codes: y[0] + scores(q.inner, y[1], codes),
    weigh=lambda q, w, codes: (w.sum(-1, keepdims=True), weigh(q.inner, w, codes)),
    restore=lambda q, sums: restore(q.inner, sums[1]) + sums[0] * q.mean,
    lay_out=lambda q, codes, transposed: lay_out(q.inner, codes, transposed=transposed),
    in_integers=lambda q: in_integers(q.inner),
)
RULES[Residual] = Rule(
    prepare=lambda q, y: (prepare(q.first, y), prepare(q.second, y)),
    scores=lambda q, y, codes: scores(q.first, y[0], codes[0]) + scores(q.second, y[1], codes[1]),
    weigh=lambda q, w, codes: (weigh(q.first, w, codes[0]), weigh(q.second, w, codes[1])),
    restore=lambda q, sums: restore(q.first, sums[0]) + restore(q.second, sums[1]),
    lay_out=lambda q, codes, transposed: (
        lay_out(q.first, codes[0], transposed=transposed),
        lay_out(q.second, codes[1], transposed=transposed),
    ),
    in_integers=lambda q: in_integers(q.first) and in_integers(q.second),
)
RULES[Split] = Rule(
    prepare=lambda q, y: tuple(map(prepare, q.parts, q.split(y))),
    scores=lambda q, y, codes: functools.reduce(operator.add, map(scores, q.parts, y, codes)),
    weigh=lambda q, w, codes: tuple(weigh(part, w, code) for part, code in zip(q.parts, codes, strict=True)),
    restore=lambda q, sums: jnp.concatenate(list(map(restore, q.parts, sums)), axis=-1),
    lay_out=lambda q, codes, transposed: tuple(map(functools.partial(lay_out, transposed=transposed), q.parts, codes)),
    in_integers=lambda q: all(map(in_integers, q.parts)),
)
RULES[PerHead] = Rule(
    prepare=over_heads(prepare),
    scores=over_heads(scores),
    weigh=over_heads(weigh),
    restore=over_heads(restore),
    lay_out=lambda q, codes, transposed: over_heads(functools.partial(lay_out, transposed=transposed))(q, codes),
    in_integers=lambda q: in_integers(q.inner),
)
RULES[Exact] = Rule(
    scores=lambda q, y, codes: integers.full_precision_einsum("bhrd,bhtd->bhrt", y, codes),
    weigh=lambda q, w, codes: integers.full_precision_einsum("bhrt,bhtd->bhrd", w, codes),
)
RULES[Product] = Rule(
    prepare=lambda q, y: jax.vmap(jax.vmap(q.tables))(y),
    scores=lambda q, tables, codes: jax.vmap(jax.vmap(q.looked_up))(tables, codes),
)

_LEVELS = of_levels(
    lambda q, indices: look_up(indices, jnp.asarray(q.levels), symmetric=q.symmetric), step=lambda q: q.step
)


def _scalar_scores(quantizer: Scalar, y: integers.Limbs, codes: Codes) -> Float[Array, "b h r t"]:
    """Whole words are unpacked in the order in which indices lie in their bytes, if bytes hold whole indices; else a
    look-up of 32 bits is as fast as selections."""
    if isinstance(codes, tuple):
        return _LEVELS.scores(quantizer, y, codes)
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
    # centred, so that 8 bits fit and scale and bias do not cancel
    lambda q, indices: lax.bitcast_convert_type(indices - jnp.uint8(2 ** (q.bits - 1)), jnp.int8),
    grid=Grid(
        groups=lambda q: q.dim // q.group_size,
        arrays=lambda q, codes: codes[1:],
        numbers=lambda q, scale, bias: (scale, bias + 2 ** (q.bits - 1) * scale),
    ),
)
RULES[Affine] = lambda q: _AFFINE._replace(lay_out=_as_encoded, weigh=_decoded_sums) if q.keeps_words else _AFFINE
_STATES = Rule(
    prepare=lambda q, y: integers.query_limbs(y),
    scores=lambda q, y, codes: integers.products(y, q.table(q.states(codes))) * q.table.step,
    weigh=lambda q, w, codes: integers.sums(w, jnp.swapaxes(q.table(q.states(codes)), 2, 3)) * q.table.step,
    in_integers=lambda q: True,
)
RULES[Trellis] = lambda q: _STATES if q.table.whole else DECODED
