"""Products with the codes of a cache, in the layout of `tiles`: scores of keys, weighted sums of values.

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
from jaxtyping import Array, Float, Int8, Int32, UInt8

from rqjax import ops, tiles
from rqjax.affine import Affine
from rqjax.combinators import Centered, Normalized, Residual, Rotated, Scaled, Split
from rqjax.lanes import as_float32
from rqjax.quantizer import Codes, Quantizer
from rqjax.scalar import Scalar
from rqjax.sign import Sign

QUERY_LIMBS, WEIGHT_LIMBS = 2, 3
"""int8 limbs: 15 bits of a query's largest coordinate; 22 bits of the largest weight, so that a long flat tail of small
weights beside a large one is kept."""


def prepare(quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Any:
    """What `scores` needs of the queries."""
    match quantizer:
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
            return limbs(quantizer.sketch(y), QUERY_LIMBS)
        case Affine():
            groups = y.reshape(*y.shape[:-1], -1, quantizer.group_size)
            return [(limbs(groups[..., g, :], QUERY_LIMBS), groups[..., g, :].sum(-1)) for g in range(groups.shape[-2])]
        case Scalar() if tiles.has_indices(quantizer):
            return limbs(y, QUERY_LIMBS)
    return y


def scores(quantizer: Quantizer, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
    """Inner products of the queries with the keys behind `codes`."""
    match quantizer:
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
            products = _products(prepared, _levels(quantizer, _key_tile(codes[1], 1)))
            return products * (quantizer.gain * as_float32(codes[0]))[:, :, None]
        case Affine():
            levels = _levels(quantizer, _key_tile(codes[0], quantizer.bits))
            size, total = quantizer.group_size, jnp.float32(0)
            for g, (y, sums) in enumerate(prepared):
                scale, bias = _grid(quantizer, codes, g)
                products = _products(y, levels[..., g * size : (g + 1) * size])
                total += products * scale[:, :, None] + sums[..., None] * bias[:, :, None]
            return jnp.asarray(total)
        case Scalar() if tiles.has_indices(quantizer):
            return _products(prepared, _levels(quantizer, _key_tile(codes, quantizer.bits))) * quantizer.step
    return jax.vmap(jax.vmap(quantizer.dot))(prepared, codes)


def weighted(quantizer: Quantizer, w: Float[Array, "b h r t"], codes: Codes) -> Any:
    """Sums of the values behind `codes` with weights w, not yet rotated back; their sums over tokens may be added."""
    match quantizer:
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
        case Affine():
            levels = _levels(quantizer, tiles.unpack_rows(codes[0], quantizer.bits, quantizer.dim))
            size, sums = quantizer.group_size, []
            for g in range(quantizer.dim // size):
                scale, bias = _grid(quantizer, codes, g)
                part = _sums(w * scale[:, :, None], levels[..., g * size : (g + 1) * size, :])
                sums.append(part + (w * bias[:, :, None]).sum(-1, keepdims=True))
            return jnp.concatenate(sums, axis=-1)
        case Scalar() if tiles.has_indices(quantizer):
            return _sums(w, _levels(quantizer, tiles.unpack_rows(codes, quantizer.bits, quantizer.dim))) * quantizer.step
    return jnp.einsum("bhrt,bhtd->bhrd", w, quantizer.decode(codes), precision=lax.Precision.HIGHEST)


def restore(quantizer: Quantizer, sums: Any) -> Float[Array, "b h r d"]:
    """What `weighted` sums, rotated back."""
    match quantizer:
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


def limbs(x: Float[Array, "b h r d"], count: int) -> tuple[Int8[Array, "b h limbs d"], Float[Array, "b h r 1"]]:
    """x as `count` int8 limbs of base 128, the highest first, stacked along the rows; and the unit of the last one."""
    unit = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / (127 * 128.0 ** (count - 1))
    rest, parts = jnp.round(x / jnp.where(unit > 0, unit, 1)), []
    for k in reversed(range(1, count)):
        high = jnp.round(rest / 128.0**k)
        rest = rest - high * 128.0**k
        parts.append(high.astype(jnp.int8))
    return jnp.concatenate([*parts, rest.astype(jnp.int8)], axis=-2), unit


def _joined(products: Int32[Array, "b h limbs n"], unit: Float[Array, "b h r 1"]) -> Float[Array, "b h r n"]:
    """Exact products with limbs as products with what the limbs stand for."""
    rows = unit.shape[-2]
    parts = [products[:, :, k : k + rows].astype(jnp.float32) for k in range(0, products.shape[2], rows)]
    return functools.reduce(lambda high, low: high * 128 + low, parts) * unit


def _products(y: tuple[Array, Array], levels: Int8[Array, "b h t d"]) -> Float[Array, "b h r t"]:
    return _joined(jnp.einsum("bhrd,bhtd->bhrt", y[0], levels, preferred_element_type=jnp.int32), y[1])


def _sums(w: Float[Array, "b h r t"], levels: Int8[Array, "b h d t"]) -> Float[Array, "b h r d"]:
    parts, unit = limbs(w, WEIGHT_LIMBS)
    return _joined(jnp.einsum("bhrt,bhdt->bhrd", parts, levels, preferred_element_type=jnp.int32), unit)


def _key_tile(tile: UInt8[Array, "b h units packed d"], bits: int) -> UInt8[Array, "b h t d"]:
    batch, heads, units, _, dim = tile.shape
    return tiles.unpack_rows(tile, bits, tiles.UNIT).reshape(batch, heads, units * tiles.UNIT, dim)


def _levels(quantizer: Quantizer, indices: UInt8[Array, "b h m n"]) -> Int8[Array, "b h m n"]:
    match quantizer:
        case Scalar():
            return tiles.look_up(indices, jnp.asarray(quantizer.levels), symmetric=quantizer.symmetric)
        case Affine():  # centred, so that 8 bits fit and scale and bias do not cancel
            return lax.bitcast_convert_type(indices - jnp.uint8(2 ** (quantizer.bits - 1)), jnp.int8)
    return 2 * indices.astype(jnp.int8) - 1


def _grid(quantizer: Affine, codes: Codes, group: int) -> tuple[Float[Array, "b h t"], Float[Array, "b h t"]]:
    """Scale and bias of centred indices."""
    scale, bias = (as_float32(code[:, :, group]) for code in codes[1:])
    return scale, bias + 2 ** (quantizer.bits - 1) * scale
