"""Recipes: the only place where names of papers appear. A new method is one function behind `@recipe`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from rqjax.core import ELSEWHERE, Key, Quantizer, Registry, check_int, random
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.combinators import Normalized, Residual, Rotated, Scaled, Split
from rqjax.quantizers.nested_e8 import NestedE8
from rqjax.quantizers.scalar import lloyd_max
from rqjax.quantizers.trellis_per_coordinate import trellis_coded
from rqjax.recipes.sketches import Sign
from rqjax.rotations import Chain, Dense, Givens, Hadamard, MultivectorRotor, Quaternion, Rotor

Recipe = TypeVar("Recipe", bound=Callable[..., Quantizer])
METHODS = Registry("method", {})
"""Data-oblivious recipes: `METHODS[name](key, dim, bits)` is a quantizer of `dim`-dimensional vectors."""
ELSEWHERE["is a recipe of rqjax.METHODS"] = METHODS


USAGE = """
Args:
  key: random key of the rotation.
  dim: dimension of the vectors, from 1.
  bits: bits a coordinate, from 1 to 8; where recipes say so, fractional.

Returns:
  A quantizer of vectors (..., dim) of any float dtype; `bits_per_vector` counts its norm or scale, too.

Raises:
  ValueError: `dim` or `bits` is out of range.

Example:
  >>> import jax, rqjax
  >>> q = rqjax.{name}(jax.random.key(0), dim=64, bits=2)
  >>> q.decode(q.encode(jax.random.normal(jax.random.key(1), (3, 64)))).shape
  (3, 64)
"""
"""Text that completes the docstring of every recipe."""


def recipe(make: Recipe) -> Recipe:
    """Enters a recipe into `METHODS`, checks the dimension that it is called with, and completes its docstring."""

    @functools.wraps(make)
    def checked(key: Key, dim: int, bits: float | int) -> Quantizer:
        return make(key, check_int("dim", dim, 1, 2**24), bits)

    checked.__doc__ = f"{inspect.getdoc(make)}\n{USAGE.format(name=make.__name__)}"
    METHODS[make.__name__] = checked
    return checked  # pyright: ignore[reportReturnType]


@recipe
def rtn(key: Key, dim: int, bits: int) -> Quantizer:
    """Round-to-nearest: one affine grid a vector."""
    return Affine(dim, bits, group_size=dim)


@recipe
def identity(key: Key, dim: int, bits: int) -> Quantizer:
    """TurboQuant without its rotation, to show what the rotation is worth."""
    return Normalized(lloyd_max(dim, bits))


@recipe
def turboquant(key: Key, dim: int, bits: int) -> Quantizer:
    """TurboQuant-mse (Algorithm 1): uniform rotation, Lloyd-Max levels.

    Source: Zandieh, Daliri, Hadian & Mirrokni, 2025, arXiv:2504.19874.
    """
    return Normalized(Rotated(Dense.haar(key, dim), lloyd_max(dim, bits)))


@recipe
def turboquant_prod(key: Key, dim: int, bits: int) -> Quantizer:
    """TurboQuant-prod (Algorithm 2): `turboquant` at b - 1 bits, one bit of Gaussian sketch on the residual.

    Sources: Zandieh, Daliri, Hadian & Mirrokni, 2025, arXiv:2504.19874; Zandieh, Daliri & Han, 2024,
    arXiv:2406.03482 (QJL).
    """
    return _prod(turboquant, Sign.gaussian, key, dim, bits)


@recipe
def turboquant_prod_orthogonal(key: Key, dim: int, bits: int) -> Quantizer:
    """TurboQuant-prod with an orthogonal sketch.

    Sources: Zandieh, Daliri, Hadian & Mirrokni, 2025, arXiv:2504.19874; Zandieh, Daliri & Han, 2024,
    arXiv:2406.03482 (QJL).
    """
    return _prod(turboquant, Sign.orthogonal, key, dim, bits)


@recipe
def turboquant_mixed(key: Key, dim: int, bits: float | int) -> Quantizer:
    """TurboQuant with fractional bits: a fixed share of the rotated channels gets one bit more (2.5: half at 3).

    Source: Zandieh, Daliri, Hadian & Mirrokni, 2025, arXiv:2504.19874.
    """
    return Normalized(Rotated(Dense.haar(key, dim), mixed(lloyd_max, dim, bits)))


@recipe
def hadamard(key: Key, dim: int, bits: int) -> Quantizer:
    """TurboQuant with one randomized Hadamard round as its rotation."""
    return Normalized(Rotated(Hadamard.random(key, dim), lloyd_max(dim, bits)))


@recipe
def rotorquant(key: Key, dim: int, bits: int) -> Quantizer:
    """RotorQuant: Clifford rotors in blocks of three, with the codebook of the vector's own dimension.

    Source: RotorQuant (Pope, 2026).
    """
    return Normalized(Rotated(Rotor.random(key, dim), lloyd_max(dim, bits)))


@recipe
def rotorquant_prod(key: Key, dim: int, bits: int) -> Quantizer:
    """RotorQuant at b - 1 bits, one bit of Gaussian sketch on the residual (section 3.4).

    Source: RotorQuant (Pope, 2026).
    """
    return _prod(rotorquant, Sign.gaussian, key, dim, bits)


@recipe
def rotorquant_paper(key: Key, dim: int, bits: int) -> Quantizer:
    """RotorQuant as published: full multivectors, one codebook a grade, scaled for 8 ceil(d/3) coordinates.

    That scale does not fit the d coordinates there are, which is the published loss against TurboQuant (Table 4). All
    eight components are stored, the trivector with one bit less.
    """
    groups = -(-dim // 3)
    grades = [(groups, bits), (3 * groups, bits), (3 * groups, bits), (groups, max(bits - 1, 1))]
    parts = tuple(lloyd_max(size, b, sphere_dim=8 * groups) for size, b in grades)
    bivectors = Rotor.random(key, 3 * groups).bivectors
    return Normalized(Rotated(MultivectorRotor(bivectors, dim=dim), Split(parts)))


@recipe
def rotorquant_paper_prod(key: Key, dim: int, bits: int) -> Quantizer:
    """The published RotorQuant at b - 1 bits, one bit of Gaussian sketch on the residual (Table 5).

    Source: RotorQuant (Pope, 2026).
    """
    return _prod(rotorquant_paper, Sign.gaussian, key, dim, bits)


@recipe
def planarquant(key: Key, dim: int, bits: int) -> Quantizer:
    """Plane rotations in blocks of two.

    Source: RotorQuant (Pope, 2026).
    """
    return Normalized(Rotated(Givens.random(key, dim), lloyd_max(dim, bits)))


@recipe
def isoquant(key: Key, dim: int, bits: int) -> Quantizer:
    """Pairs of quaternions in blocks of four.

    Source: RotorQuant (Pope, 2026).
    """
    return Normalized(Rotated(Quaternion.random(key, dim), lloyd_max(dim, bits)))


@recipe
def rotor_chain(key: Key, dim: int, bits: int) -> Quantizer:
    """Rotors and one randomized Hadamard round: every coordinate is mixed with every other.

    The rotors come first. After the Hadamard round the loud channels of an ordered spectrum would have the same
    magnitude in all three planes that a rotor mixes. The error would be 8 % above Haar's.
    """
    return Normalized(Rotated(_rotor_chain(key, dim), lloyd_max(dim, bits)))


@recipe
def eden(key: Key, dim: int, bits: float | int) -> Quantizer:
    """TurboQuant-mse with the best scale per vector: EDEN.

    Bits may be fractional, as in `turboquant_mixed`.

    Source: EDEN (Vargaftik et al., 2022, arXiv:2108.08842).
    """
    return Scaled(Rotated(Dense.haar(key, dim), mixed(lloyd_max, dim, bits)))


@recipe
def eden_unbiased(key: Key, dim: int, bits: int) -> Quantizer:
    """EDEN with the scale that makes inner products unbiased.

    Source: EDEN (Vargaftik et al., 2022, arXiv:2108.08842).
    """
    return Scaled(Rotated(Dense.haar(key, dim), lloyd_max(dim, bits)), mode="unbiased")


@recipe
def turboquant_trellis(key: Key, dim: int, bits: float | int) -> Quantizer:
    """`eden` with a trellis of 2^8 states in the place of levels, 0.5 to 8 bits in steps of an eighth.

    Sources: QTIP (Tseng et al., 2024, arXiv:2406.11235); Mao, Gray & Linder, 2010; EDEN (Vargaftik et al., 2022,
    arXiv:2108.08842).
    """
    return Scaled(Rotated(Dense.haar(key, dim), trellis_coded(dim, bits)))


@recipe
def turboquant_trellis_unbiased(key: Key, dim: int, bits: float | int) -> Quantizer:
    """`turboquant_trellis` with the scale that makes inner products unbiased.

    Sources: QTIP (Tseng et al., 2024, arXiv:2406.11235); Mao, Gray & Linder, 2010; EDEN (Vargaftik et al., 2022,
    arXiv:2108.08842).
    """
    return Scaled(Rotated(Dense.haar(key, dim), trellis_coded(dim, bits)), mode="unbiased")


@recipe
def rotorquant_trellis(key: Key, dim: int, bits: float | int) -> Quantizer:
    """`turboquant_trellis` with the rotation of `rotor_chain`, after which coordinates are as near to Gaussian.

    Sources: QTIP (Tseng et al., 2024, arXiv:2406.11235); Mao, Gray & Linder, 2010; EDEN (Vargaftik et al., 2022,
    arXiv:2108.08842).
    """
    return Scaled(Rotated(_rotor_chain(key, dim), trellis_coded(dim, bits)))


@recipe
def nested_e8(key: Key, dim: int, bits: int) -> Quantizer:
    """`eden` with points of a nested lattice E8 in the place of levels, and 0.25 bits a coordinate for their scales.

    From 2 bits on; at 1 bit levels have less error.

    Sources: NestQuant (Savkin et al., 2025, arXiv:2502.09720); Conway & Sloane, 1983; EDEN (Vargaftik et al., 2022,
    arXiv:2108.08842).
    """
    return Scaled(Rotated(Dense.haar(key, dim), NestedE8.gaussian(dim, bits, variance=1 / dim)))


@recipe
def affine(key: Key, dim: int, bits: int) -> Quantizer:
    """Affine groups of 64 (MLX's layout; TurboQuant MLX's V2 LEAN), of 32 or the whole where 64 does not divide d.

    Source: TurboQuant MLX, of 2026; the layout is that of `mx.quantize`.
    """
    return Affine(dim, bits, group_size=next((size for size in (64, 32) if dim % size == 0), dim))


@recipe
def affine_rotated(key: Key, dim: int, bits: int) -> Quantizer:
    """Affine groups after a uniform rotation (V2 rotated): the norm is in the scales and biases.

    Source: TurboQuant MLX, of 2026; the layout is that of `mx.quantize`.
    """
    return Rotated(Dense.haar(key, dim), affine(key, dim, bits))


@recipe
def affine_rotated_sign(key: Key, dim: int, bits: int) -> Quantizer:
    """`affine_rotated` and one bit more of Gaussian sketch on the residual (V2 rotated + QJL).

    Source: TurboQuant MLX, of 2026; the layout is that of `mx.quantize`.
    """
    first, second = random.split(key)
    return Residual(affine_rotated(first, dim, bits), Sign.gaussian(second, dim))


def mixed(make: Callable[..., Quantizer], dim: int, bits: float | int) -> Quantizer:
    """Makes a quantizer by `make(dim, bits, sphere_dim=)`; in two parts where bits are fractional, the first of one bit
    more."""
    low = check_int("bits" if float(bits).is_integer() else "the whole part of bits", int(bits // 1), 1, 8)
    high_dim = round((bits - low) * dim)
    parts = tuple(make(size, b, sphere_dim=dim) for size, b in ((high_dim, low + 1), (dim - high_dim, low)) if size)
    return parts[0] if len(parts) == 1 else Split(parts)


def _rotor_chain(key: Key, dim: int) -> Chain:
    first, second = random.split(key)
    return Chain((Rotor.random(first, dim), Hadamard.random(second, dim)))


def _prod(recipe: Callable[..., Any], sketch: Callable[..., Quantizer], key: Key, dim: int, bits: int) -> Quantizer:
    """Two stages: `recipe` at b - 1 bits and a sign sketch; at 1 bit the sketch alone."""
    check_int("bits", bits, 1, 8)
    first, second = random.split(key)
    if bits == 1:
        return sketch(second, dim)
    return Normalized(Residual(recipe(first, dim, bits - 1).inner, sketch(second, dim)))
