"""Products with codes: scores of keys, weighted sums of values. The codes of a cache are in the layout of `tiles`;
scores are taken of codes as `encode` returns them, too.

    scores(q, prepare(q, y), keys)        == y @ decode(keys).T
    restore(q, weighted(q, w, values))    == w @ decode(values)

Queries are rotated once in `prepare`, sums are rotated back once in `restore`; no vector is ever decoded. The rules
follow the nest: what a combinator does to vectors it does here to queries, scores, weights and sums. Indices meet
queries and weights that are split into int8 limbs, so that products are exact integers; scales and biases are folded
into scores and weights. Quantizers without a rule are decoded as they are, the few tokens of one call.

Shapes: queries y (batch, heads, rows, d), weights w (batch, heads, rows, tokens).
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int8, Int32, Shaped, UInt8

from rqjax import mlx, ops, packing, platforms, tiles
from rqjax.affine import Affine
from rqjax.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
from rqjax.lanes import as_float32
from rqjax.per_head import PerHead, over_heads
from rqjax.quantizer import Codes, Quantizer
from rqjax.scalar import Scalar
from rqjax.sign import Sign
from rqjax.trellis import Trellis

BASE = 128
"""Of the int8 limbs: the highest is from -127 to 127, the others are from 0 to 127."""
QUERY_LIMBS, WEIGHT_LIMBS = 2, 3
"""15 bits of a query's largest coordinate; 22 bits of the largest weight, so that a long flat tail of small weights
beside a large one is kept. A third limb of the queries would take 10 to 15 % more time for an error that is a twentieth
of the codes' own at most: 2e-5 of the norms of query and key, one coordinate 1,000 times as large as the others."""
TOKENS = (2**31 - 1) // (128 * (BASE - 1))
"""Over which a sum of levels times limbs stays within int32: no level is beyond 128."""


def prepare(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Any:
    """What `scores` needs of the queries."""
    match quantizer:
        case PerHead():
            return over_heads(prepare)(quantizer, y)
        case Normalized() | Scaled():
            return prepare(quantizer.inner, y)
        case Rotated():
            return prepare(quantizer.inner, quantizer.rotation(y))
        case Centered():
            return ops.inner(y, quantizer.mean)[..., None], prepare(quantizer.inner, y)
        case Residual():
            return prepare(quantizer.first, y), prepare(quantizer.second, y)
        case Split():
            return tuple(prepare(p, part) for p, part in zip(quantizer.parts, quantizer.split(y), strict=True))
        case Sign():
            return _query_limbs(quantizer.sketch(y))
        case Affine() if mlx.takes(quantizer):
            return y
        case Affine():
            groups = y[:, :, None] * _members(quantizer)[:, None]
            return _query_limbs(_flat(groups)), groups.sum(-1)
        case Scalar() if tiles.has_indices(quantizer):
            return _query_limbs(y)
        case Trellis() if quantizer.table.whole:
            return _query_limbs(y)
    return y


def scores(quantizer: Quantizer, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
    """Inner products of the queries with the keys behind `codes`."""
    match quantizer:
        case PerHead():
            return over_heads(scores)(quantizer, prepared, codes)
        case Normalized() | Scaled():
            return scores(quantizer.inner, prepared, codes[1]) * as_float32(codes[0])[:, :, None]
        case Rotated():
            return scores(quantizer.inner, prepared, codes)
        case Centered():
            return prepared[0] + scores(quantizer.inner, prepared[1], codes)
        case Residual():
            return scores(quantizer.first, prepared[0], codes[0]) + scores(quantizer.second, prepared[1], codes[1])
        case Split():
            return functools.reduce(operator.add, map(scores, quantizer.parts, prepared, codes))
        case Sign():
            products = _key_products(quantizer, prepared, codes)
            return products * (quantizer.gain * as_float32(codes[0]))[:, :, None]
        case Affine() if mlx.takes(quantizer):
            return mlx.products(quantizer, prepared, codes, transpose=True)
        case Affine():
            scale, bias = _grid(quantizer, codes)
            products = _products(prepared[0], _key_levels(quantizer, codes))
            products = products.reshape(*prepared[1].shape, -1) * scale + prepared[1][..., None] * bias
            return functools.reduce(operator.add, [products[:, :, g] for g in range(products.shape[2])])  # no reduction
        case Scalar() if tiles.has_indices(quantizer):
            return _key_products(quantizer, prepared, codes) * quantizer.step
        case Trellis() if quantizer.table.whole:
            return _products(prepared, quantizer.table(quantizer.states(codes))) * quantizer.table.step
    return jax.vmap(jax.vmap(quantizer.dot))(prepared, codes)


def has_rule(quantizer: Quantizer) -> bool:
    """Whether products with the codes of a quantizer are taken with its levels or its grid, without decoding."""

    def one(inner: Quantizer) -> bool:
        if isinstance(inner, Trellis):
            return inner.table.whole
        return isinstance(inner, Affine) or tiles.has_indices(inner)

    return tiles.every(quantizer, one)


def weighted(quantizer: Quantizer, w: Float[Array, "b h r t"], codes: Codes) -> Any:
    """Sums of the values behind `codes`, `TOKENS` at most, with weights w, not yet rotated back; sums may be added."""
    match quantizer:
        case PerHead():
            return over_heads(weighted)(quantizer, w, codes)
        case Normalized() | Scaled():
            return weighted(quantizer.inner, w * as_float32(codes[0])[:, :, None], codes[1])
        case Rotated():
            return weighted(quantizer.inner, w, codes)
        case Centered():
            return w.sum(-1, keepdims=True), weighted(quantizer.inner, w, codes)
        case Residual():
            return weighted(quantizer.first, w, codes[0]), weighted(quantizer.second, w, codes[1])
        case Split():
            return tuple(weighted(part, w, code) for part, code in zip(quantizer.parts, codes, strict=True))
        case Sign():
            levels = _levels(quantizer, tiles.unpack_rows(codes[1], 1, quantizer.dim))
            return _sums(w * as_float32(codes[0])[:, :, None], levels) * quantizer.gain
        case Affine() if mlx.takes(quantizer):
            return mlx.products(quantizer, w, codes, transpose=False)
        case Affine() if isinstance(codes[0], tuple):
            levels = _levels(quantizer, tiles.unpack_rows(codes[0], quantizer.bits, quantizer.dim))
            scale, bias = _grid(quantizer, codes)
            groups = w[:, :, None] * scale
            sums = _sums(_flat(groups), levels)
            shifts = jnp.einsum("bhrt,bhgt->bhgr", w, bias[:, :, :, 0], precision=lax.Precision.HIGHEST)
            sums = sums.reshape(*groups.shape[:-1], quantizer.dim) + shifts[..., None]
            return (sums * _members(quantizer)[:, None]).sum(2)
        case Scalar() if tiles.has_indices(quantizer):
            return (
                _sums(w, _levels(quantizer, tiles.unpack_rows(codes, quantizer.bits, quantizer.dim))) * quantizer.step
            )
        case Trellis() if quantizer.table.whole:
            levels = quantizer.table(quantizer.states(codes))
            return _sums(w, jnp.swapaxes(levels, 2, 3)) * quantizer.table.step
    return jnp.einsum("bhrt,bhtd->bhrd", w, quantizer.decode(codes), precision=lax.Precision.HIGHEST)


def restore(quantizer: Quantizer, sums: Any) -> Float[Array, "b h r d"]:
    """What `weighted` sums, rotated back."""
    match quantizer:
        case PerHead():
            return over_heads(restore)(quantizer, sums)
        case Normalized() | Scaled():
            return restore(quantizer.inner, sums)
        case Rotated():
            return quantizer.rotation.inverse(restore(quantizer.inner, sums))
        case Centered():
            return restore(quantizer.inner, sums[1]) + sums[0] * quantizer.mean
        case Residual():
            return restore(quantizer.first, sums[0]) + restore(quantizer.second, sums[1])
        case Split():
            return jnp.concatenate(list(map(restore, quantizer.parts, sums)), axis=-1)
        case Sign():
            return quantizer.sketch.inverse(sums)
    return sums


def exact(subscripts: str, y: Float[Array, "b h r n"], x: Shaped[Array, "b h t d"]) -> Float[Array, "b h r m"]:
    """An einsum with tokens in full precision. bfloat16 is used as it is, with y in three parts of 8 bits each."""
    if x.dtype != jnp.bfloat16 or platforms.on_apple():
        return jnp.einsum(subscripts, y, as_float32(x), precision=lax.Precision.HIGHEST)
    parts = []
    for _ in range(3):
        parts.append(y.astype(jnp.bfloat16))
        y = y - parts[-1].astype(jnp.float32)
    sums = jnp.einsum(subscripts, jnp.concatenate(parts, axis=2), x, preferred_element_type=jnp.float32)
    return functools.reduce(operator.add, jnp.split(sums, 3, axis=2))


def limbs(x: Float[Array, "b h r d"], count: int) -> tuple[Int8[Array, "b h limbs d"], Float[Array, "b h r 1"]]:
    """x as `count` int8 limbs, the highest first, stacked along the rows; and the unit of the last one."""
    unit = jnp.abs(x).max(-1, keepdims=True) / ((BASE - 1) * float(BASE) ** (count - 1))
    whole = jnp.round(x / jnp.where(unit > 0, unit, 1)).astype(jnp.int32)
    bits = BASE.bit_length() - 1
    low = [(whole >> bits * k) & (BASE - 1) for k in reversed(range(count - 1))]
    return jnp.concatenate([whole >> bits * (count - 1), *low], axis=-2).astype(jnp.int8), unit


def _joined(
    products: Int32[Array, "b h limbs n"], unit: Float[Array, "b h r 1"], count: int
) -> Float[Array, "b h r n"]:
    """Exact products with limbs as products with what the limbs stand for."""
    parts = [part.astype(jnp.float32) for part in jnp.split(products, count, axis=2)]
    return functools.reduce(lambda high, low: high * BASE + low, parts) * unit


def _query_limbs(y: Float[Array, "b h r d"]) -> tuple[Array, Array] | Array:
    if platforms.on_apple():
        return y
    return limbs(y, QUERY_LIMBS)


def _products(y: tuple[Array, Array] | Array, levels: Int8[Array, "b h t d"]) -> Float[Array, "b h r t"]:
    if not isinstance(y, tuple):
        return mlx.level_products(y, levels)
    products = jnp.einsum("bhrd,bhtd->bhrt", y[0], levels, preferred_element_type=jnp.int32)
    return _joined(products, y[1], QUERY_LIMBS)


def _sums(w: Float[Array, "b h r t"], levels: Int8[Array, "b h d t"]) -> Float[Array, "b h r d"]:
    if platforms.on_apple():
        return mlx.level_products(w, levels)
    parts, unit = limbs(w, WEIGHT_LIMBS)
    sums = jnp.einsum("bhdt,bhrt->bhdr", levels, parts, preferred_element_type=jnp.int32)  # faster than into bhrd
    return _joined(jnp.swapaxes(sums, 2, 3), unit, WEIGHT_LIMBS)


def _key_products(quantizer: Scalar | Sign, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
    """Queries times levels. Whole words are unpacked in the order in which indices lie in their bytes."""
    words, bits = (codes[1], 1) if isinstance(quantizer, Sign) else (codes, quantizer.bits)
    order = packing.octet_order(quantizer.dim, bits)
    if isinstance(words, tuple) or order is None:
        return _products(prepared, _key_levels(quantizer, codes))
    y = (prepared[0][..., order], prepared[1]) if isinstance(prepared, tuple) else prepared[..., order]
    return _products(y, _levels(quantizer, packing.unpack_octets(words, bits)))


def _key_levels(quantizer: Any, codes: Codes) -> Int8[Array, "b h t d"]:
    match quantizer:
        case Affine():
            tile, bits = codes[0], quantizer.bits
        case Sign():
            tile, bits = codes[1], 1
        case _:
            tile, bits = codes, quantizer.bits
    if isinstance(tile, tuple):
        batch, heads, units, _, dim = tile[0].shape
        indices = tiles.unpack_rows(tile, bits, tiles.UNIT)
        return _levels(quantizer, indices.reshape(batch, heads, units * tiles.UNIT, dim))
    indices = quantizer.indices(codes)
    if isinstance(quantizer, Scalar):
        return jnp.asarray(quantizer.levels)[indices]  # of whole words a look-up is as fast, and selections are not
    return _levels(quantizer, indices.astype(jnp.uint8))


def _levels(quantizer: Quantizer, indices: UInt8[Array, "b h m n"]) -> Int8[Array, "b h m n"]:
    match quantizer:
        case Scalar():
            return tiles.look_up(indices, jnp.asarray(quantizer.levels), symmetric=quantizer.symmetric)
        case Affine():  # centred, so that 8 bits fit and scale and bias do not cancel
            return lax.bitcast_convert_type(indices - jnp.uint8(2 ** (quantizer.bits - 1)), jnp.int8)
    return 2 * indices.astype(jnp.int8) - 1


def _members(quantizer: Affine) -> Float[Array, "groups d"]:
    """1 where a coordinate belongs to a group. Groups are rows of one dot product: rows are cheap, slices are not."""
    return jnp.repeat(jnp.eye(quantizer.dim // quantizer.group_size), quantizer.group_size, axis=1)


def _flat(x: Float[Array, "b h g r n"]) -> Float[Array, "b h rows n"]:
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _grid(quantizer: Affine, codes: Codes) -> tuple[Float[Array, "b h g 1 t"], Float[Array, "b h g 1 t"]]:
    """Scale and bias of centred indices."""
    scale, bias = map(as_float32, codes[1:])
    if not isinstance(codes[0], tuple):
        scale, bias = jnp.swapaxes(scale, 2, 3), jnp.swapaxes(bias, 2, 3)
    scale, bias = scale[:, :, :, None], bias[:, :, :, None]
    return scale, bias + 2 ** (quantizer.bits - 1) * scale
