"""What caches and indexes need of a quantizer, one rule a class: products with codes, and their layout in a cache.

    scores(q, prepare(q, y), keys)      == y @ decode(keys).T
    restore(q, weigh(q, w, values))     == w @ decode(values)

Queries are rotated once in `prepare`, sums are rotated back once in `restore`; no vector is ever decoded. What a
combinator does to vectors its rule does to queries, scores, weights and sums. Levels meet queries and weights that are
split into int8 limbs; scales and biases are folded into scores and weights. Codes are as a cache lays them out
(`tiles`), or as `encode` returns them.

Shapes: queries y (batch, heads, rows, d), weights w (batch, heads, rows, tokens).
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rqjax.arrays import norms
from rqjax.arrays.blocks import inner
from rqjax.core import Codes, Quantizer, operation
from rqjax.quantizers.clipped import Clipped
from rqjax.quantizers.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
from rqjax.quantizers.gain import Gain
from rqjax.quantizers.per_head import PerHead, over_heads
from rqjax.scoring import integers
from rqjax.scoring.tiles import TokenArray


def _as_encoded(quantizer: Quantizer, codes: Codes, transposed: bool) -> Codes:
    return jax.tree.map(lambda leaf: TokenArray.of(leaf, axis=2, tokens_per_entry=quantizer.tile), codes)


def _decoded_scores(
    quantizer: Quantizer, y: Float[Array, "b h r d"], codes: Codes, transposed: bool
) -> Float[Array, "b h r t"]:
    return jax.vmap(jax.vmap(quantizer.dot))(y, codes)


def _decoded_sums(quantizer: Quantizer, w: Float[Array, "b h r t"], codes: Codes) -> Float[Array, "b h r d"]:
    return integers.weighted_sums(w, quantizer.decode(codes))


class Rule(NamedTuple):
    """What is done for the quantizers of a class; the defaults decode a block of codes as they are.

    That is the best where each coordinate has levels in float of its own (`Columns` before they are `rounded`,
    `Uniform` with a grid of each column), a center of its own (`Local`) or another place in each vector (`Exchange`).
    """

    prepare: Callable[[Any, Array], Any] = lambda quantizer, y: y
    """What `scores` needs of the queries."""
    scores: Callable[[Any, Any, Codes, bool], Array] = _decoded_scores
    """Inner products of the queries with the keys behind codes, told whether these lie in the layout of values."""
    weigh: Callable[[Any, Array, Codes], Any] = _decoded_sums
    """Sums of the values behind codes, not yet rotated back; sums may be added."""
    restore: Callable[[Any, Any], Array] = lambda quantizer, sums: sums
    """What `weigh` sums, rotated back."""
    lay_out: Callable[[Any, Codes, bool], Codes] = _as_encoded
    """Codes of (batch, heads, tokens) vectors as a cache stores them, each array as a `TokenArray`."""
    in_integers: Callable[[Any], bool] = lambda quantizer: False
    """Whether products are taken with levels in int8 and nothing is decoded."""
    width: Callable[[Any], int] = lambda quantizer: 4
    """Bytes that a coordinate takes while it is multiplied."""


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
def scores(quantizer: Quantizer, prepared: Any, codes: Codes, transposed: bool = False) -> Float[Array, "b h r t"]:
    """Inner products of the queries with the keys behind `codes`, `transposed` if these lie in the layout of values."""
    return rule(quantizer).scores(quantizer, prepared, codes, transposed)


@operation
def weigh(quantizer: Quantizer, w: Float[Array, "b h r t"], codes: Codes) -> Any:
    """Sums of the values behind `codes`, `integers.TOKENS` at most, with weights w, not yet rotated back."""
    return rule(quantizer).weigh(quantizer, w, codes)


def restore(quantizer: Quantizer, sums: Any) -> Float[Array, "b h r d"]:
    """What `weigh` sums, rotated back."""
    return rule(quantizer).restore(quantizer, sums)


def lay_out(quantizer: Quantizer, codes: Codes, transposed: bool) -> Codes:
    """Codes of (batch, heads, tokens) vectors, a multiple of a cache's `unit`, in the layout of keys or of values.

    The nest stays that of the codes; each array becomes a `TokenArray`.
    """
    return rule(quantizer).lay_out(quantizer, codes, transposed)


def in_integers(quantizer: Quantizer) -> bool:
    """Whether products with the codes of a quantizer are taken with levels in int8, without decoding."""
    return rule(quantizer).in_integers(quantizer)


def width(quantizer: Quantizer) -> int:
    """Bytes that a coordinate takes while it is multiplied: blocks of codes are made by it."""
    return rule(quantizer).width(quantizer)


_AS_INNER = Rule(
    prepare=lambda q, y: prepare(q.inner, y),
    scores=lambda q, y, codes, transposed: scores(q.inner, y, codes, transposed),
    weigh=lambda q, w, codes: weigh(q.inner, w, codes),
    restore=lambda q, sums: restore(q.inner, sums),
    lay_out=lambda q, codes, transposed: lay_out(q.inner, codes, transposed),
    in_integers=lambda q: in_integers(q.inner),
    width=lambda q: width(q.inner),
)


RULES[Normalized] = RULES[Scaled] = RULES[Gain] = _AS_INNER._replace(
    scores=lambda q, y, codes, transposed: (
        scores(q.inner, y, codes[1], transposed) * norms.restored(codes[0])[:, :, None]
    ),
    weigh=lambda q, w, codes: weigh(q.inner, integers.times(w, norms.restored(codes[0])[:, :, None]), codes[1]),
    lay_out=lambda q, codes, transposed: (TokenArray.of(codes[0], axis=2), lay_out(q.inner, codes[1], transposed)),
)
RULES[Clipped] = _AS_INNER
RULES[Rotated] = _AS_INNER._replace(
    prepare=lambda q, y: prepare(q.inner, q.rotation(y)),  # <y, R^T x> = <R y, x>
    restore=lambda q, sums: q.rotation.inverse(restore(q.inner, sums)),
)
RULES[Centered] = _AS_INNER._replace(
    prepare=lambda q, y: (inner(y, q.mean)[..., None], prepare(q.inner, y)),
    scores=lambda q, y, codes, transposed: y[0] + scores(q.inner, y[1], codes, transposed),
    weigh=lambda q, w, codes: (w.sum(-1, keepdims=True), weigh(q.inner, w, codes)),
    restore=lambda q, sums: restore(q.inner, sums[1]) + sums[0] * q.mean,
)
RULES[Residual] = Rule(
    prepare=lambda q, y: (prepare(q.first, y), prepare(q.second, y)),
    scores=lambda q, y, codes, transposed: (
        scores(q.first, y[0], codes[0], transposed) + scores(q.second, y[1], codes[1], transposed)
    ),
    weigh=lambda q, w, codes: (weigh(q.first, w, codes[0]), weigh(q.second, w, codes[1])),
    restore=lambda q, sums: restore(q.first, sums[0]) + restore(q.second, sums[1]),
    lay_out=lambda q, codes, transposed: (
        lay_out(q.first, codes[0], transposed),
        lay_out(q.second, codes[1], transposed),
    ),
    in_integers=lambda q: in_integers(q.first) and in_integers(q.second),
    width=lambda q: max(width(q.first), width(q.second)),
)
RULES[Split] = Rule(
    prepare=lambda q, y: tuple(map(prepare, q.parts, q.split(y))),
    scores=lambda q, y, codes, transposed: functools.reduce(
        operator.add, map(functools.partial(scores, transposed=transposed), q.parts, y, codes)
    ),
    weigh=lambda q, w, codes: tuple(weigh(part, w, code) for part, code in zip(q.parts, codes, strict=True)),
    restore=lambda q, sums: jnp.concatenate(list(map(restore, q.parts, sums)), axis=-1),
    lay_out=lambda q, codes, transposed: tuple(
        lay_out(part, code, transposed) for part, code in zip(q.parts, codes, strict=True)
    ),
    in_integers=lambda q: all(map(in_integers, q.parts)),
    width=lambda q: max(map(width, q.parts)),
)
RULES[PerHead] = Rule(
    prepare=over_heads(prepare),
    scores=lambda q, y, codes, transposed: over_heads(functools.partial(scores, transposed=transposed))(q, y, codes),
    weigh=over_heads(weigh),
    restore=over_heads(restore),
    lay_out=lambda q, codes, transposed: over_heads(lambda inner, codes: lay_out(inner, codes, transposed))(q, codes),
    in_integers=lambda q: in_integers(q.inner),
    width=lambda q: width(q.inner),
)
