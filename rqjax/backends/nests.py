"""Nests of quantizers as kernels take them (rotations, a norm and a leaf), and limits of attention to their codes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array, Int

from pallas_kernels.packed import Packed
from rqjax.arrays import norms
from rqjax.cache.kv import KVCache
from rqjax.cache.queries import Queries
from rqjax.core import Codes, Quantizer, TokenArray
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.combinators import Normalized, Rotated, Scaled, Split
from rqjax.quantizers.gain import Gain
from rqjax.quantizers.per_head import PerHead, over_heads
from rqjax.quantizers.scalar import Scalar

DIMS, MAX_ROWS, MAX_BITS = (64, 128, 256), 16, 4
"""Head dimensions, most queries of a key-value head, and most bits that attention kernels take."""
MAX_LATENT_ROWS = 128
"""Most queries of a head whose values are parts of its keys."""


class RotatedScalar(NamedTuple):
    """A nest as rotations, one after the other, and perhaps a norm around a leaf, as the kernels take it."""

    rotations: tuple[Any, ...]
    leaf: Any
    outer: Normalized | Scaled | Gain | None
    norms: Any
    """Norms or scales from the codes of `outer`."""
    codes: Codes
    """Codes of the leaf."""

    @classmethod
    def of(cls, quantizer: Quantizer, codes: Codes = None) -> "RotatedScalar":
        """Takes a nest apart, and its codes if they are given."""
        match quantizer:
            case Normalized() | Scaled() | Gain():
                norms, inner_codes = (None, None) if codes is None else codes
                inner = cls.of(quantizer.inner, inner_codes)
                if inner.outer is None:
                    return inner._replace(outer=quantizer, norms=norms)
            case Rotated():
                inner = cls.of(quantizer.inner, codes)
                return inner._replace(rotations=(quantizer.rotation, *inner.rotations))
            case Split(parts=(part,)):
                return cls.of(part, None if codes is None else codes[0])
        return cls((), quantizer, None, None, codes)

    def rotated(self, x: Array) -> Array:
        for rotation in self.rotations:
            x = rotation(x)
        return x

    def rotated_back(self, x: Array) -> Array:
        for rotation in reversed(self.rotations):
            x = rotation.inverse(x)
        return x


def reason_of_queries(
    cache: KVCache,
    time: int,
    q_heads: int,
    mask: Any,
    sliding_window: Any,
    softcap: Any,
    *,
    turns: bool,
    latents: bool = False,
) -> str | None:
    """Returns why no kernel attends to a cache for such queries, or None.

    If it `turns`, keys may not have turned. If it takes `latents`, values may be parts of keys.
    """
    _, kv_heads, _, dim = cache.exact_keys.shape
    rows, latent = q_heads // kv_heads * time, latents and cache.values_in_keys
    most = MAX_LATENT_ROWS if latent else MAX_ROWS
    if cache.weighs_keys and not latent:
        return "values depend on the codes of the keys"
    if cache.capacity == 0:
        return "the cache has room for no codes (capacity 0)"
    if dim not in DIMS and not latent:
        return f"head_dim is {dim}, not one of {DIMS}"
    if rows > most:
        return f"{rows} queries share a head of keys and values, more than {most}"
    if mask is not None:
        return "there is a mask"
    if isinstance(softcap, jax.Array):
        return "the softcap is an array"
    if time > 1 and (sliding_window is not None or time > cache.window + 1):
        return f"the {time} queries of a sequence do not all see the same codes"
    return "codes are of keys before they turn with their positions" if cache.key_form.turns_late > turns else None


def reason_of_leaf(found: RotatedScalar, per_head: bool, normed_leaves: str = "Scalar") -> str | None:
    """Returns why no kernel attends to codes of a leaf, or None. Leaves are `Scalar` or `Affine`; the message calls
    those that take a norm `normed_leaves`."""
    leaf, normed = found.leaf, found.norms is not None
    if not isinstance(leaf, Scalar | Affine) or (isinstance(leaf, Affine) and normed):
        return f"the nest is not rotations and a norm around one {normed_leaves}, nor rotations around an Affine"
    if leaf.bits > MAX_BITS:
        return f"{leaf.bits} bits, more than {MAX_BITS}"
    if isinstance(leaf, Affine):
        return None if leaf.dtype in ("bfloat16", "float16", "float32") else f"scales in {leaf.dtype}"
    if not normed:
        return "a Scalar without a norm"
    if not (leaf.in_integers and leaf.symmetric):
        return "the levels of the Scalar are not in int8, or not marked as symmetric"
    return "a Scalar of each head" if per_head else None


def sides(cache: KVCache) -> list[tuple[Quantizer, Codes]]:
    """Returns quantizers and codes of keys and values; if a value is a part of its key, of what is before it and of
    it."""
    if cache.values_in_keys:
        return list(zip(cache.key_quantizer.parts, cache.keys, strict=True))  # pyright: ignore[reportAttributeAccessIssue]
    return [(cache.key_quantizer, cache.keys), (cache.value_quantizer, cache.values)]


def part(quantizer: Quantizer, codes: Codes = None) -> RotatedScalar:
    """Takes a nest apart; in a `PerHead` its arrays have the heads first."""
    return RotatedScalar.of(quantizer.inner if isinstance(quantizer, PerHead) else quantizer, codes)


def within_rotations(quantizer: Quantizer) -> Quantizer:
    """Returns what is within rotations."""
    while isinstance(quantizer, Rotated):
        quantizer = quantizer.inner
    return quantizer


def by_head(function: Callable[[Quantizer, Array], Array], quantizer: Quantizer, x: Array) -> Array:
    """Applies a function to x (batch, heads, ...) with the quantizer, or with each head's own."""
    return over_heads(function)(quantizer, x) if isinstance(quantizer, PerHead) else function(quantizer, x)


def bounds(cache: KVCache, queries: Queries) -> tuple[Int[Array, "batch"], Int[Array, "batch _"]]:
    """Range of the tokens in codes that queries see: the first one, and the one after the last, of each query if they
    are of several tokens."""
    start, stop = queries.coded(cache)
    return start[:, 0, 0, 0], stop[:, 0, : 1 if queries.time == 1 else None, 0]


def numbers(array: TokenArray) -> Array:
    """Stored numbers, in floating point."""
    found = lax.bitcast_convert_type(array.bits, array.dtype)
    return norms.restored(found) if array.dtype == norms.LOGARITHMIC else found


def step(leaf: Scalar | Affine) -> Any:
    """Factor of whole levels."""
    return leaf.step if isinstance(leaf, Scalar) else 1


def packed(found: RotatedScalar) -> Packed:
    """Codes of a `Scalar` in a norm, or of an `Affine`, as attention kernels take them."""
    if isinstance(found.leaf, Affine):
        tile, scales, biases = found.codes
        return Packed(tuple(section.bits for section in tile.sections), numbers(scales), numbers(biases), None)
    sections = tuple(section.bits for section in found.codes.sections)
    return Packed(sections, numbers(found.norms)[:, :, None], None, found.leaf.levels)
