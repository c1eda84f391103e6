"""Recipes that learn from data: `FITTED[name](key, x, bits)`.

`x` holds vectors (n, d), or (heads, n, d) to fit a quantizer for each head, all at once, in a `PerHead`. Recipes of
this file store as many bits as `turboquant` does, d b and 16 for a norm. An eighth of the vectors, the last ones, is
held out and decides when training stops. Product quantizers are in `vector_quantizers`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rqjax import codebooks
from rqjax.arrays import norms
from rqjax.core import Key, Quantizer, check_int, operation, random
from rqjax.learning.losses import CodingGain
from rqjax.learning.training import fit
from rqjax.quantizers.combinators import Rotated, Scaled
from rqjax.quantizers.gain import Gain, gain_of, nearest_gains
from rqjax.quantizers.per_coordinate import PerCoordinate
from rqjax.quantizers.per_head import stack_heads
from rqjax.quantizers.scalar import lloyd_max
from rqjax.quantizers.trellis_per_coordinate import TrellisPerCoordinate
from rqjax.recipes.allocation import allocate
from rqjax.recipes.fitted import fitted
from rqjax.rotations import Chain, Hadamard, Permutation, Rotation, Rotor, butterfly

TRAINING_STEPS = 1000
"""Training steps of `rotorquant_allocated`."""


@fitted
def rotorquant_learned(key: Key, x: Array, bits: int) -> Quantizer:
    """RotorQuant with learned bivectors, learned levels of each coordinate, and the best scale per vector. Channels are
    dealt out so that loud and quiet ones share a rotor."""

    def rotation(key: Key, unit: Array) -> Chain:
        rotor = Rotor.random(key, unit.shape[-1])
        return Chain((Permutation.balanced((unit**2).mean(axis=0), rotor.groups), rotor))

    return _with_levels(rotation, key, x, bits)


@fitted
def rotor_chain_learned(key: Key, x: Array, bits: int) -> Quantizer:
    """`rotor_chain` with learned bivectors, learned levels of each coordinate, and the best scale per vector."""

    def rotation(key: Key, unit: Array) -> Chain:
        first, second = random.split(key)
        return Chain((Rotor.random(first, unit.shape[-1]), Hadamard.random(second, unit.shape[-1])))

    return _with_levels(rotation, key, x, bits)


@fitted
def rotorquant_allocated(key: Key, x: Array, bits: int) -> Quantizer:
    """A transform code: learned rotors in two butterflies, bits where the variance is, levels of each coordinate.

    The rotors begin as the identity on channels sorted by their energy and are trained for the coding gain. Bits are
    given by reverse water-filling, alike for all heads, to each head's own coordinates; then bivectors and levels are
    trained together. There is no norm. A gain of 8 bits is stored if the vectors' sizes need one (`_needs_gain`), else
    nothing: that leaves 8 or 16 bits to the coordinates.
    """
    x, unstack = stack_heads(x)
    return unstack(_transform_codes(key, x, bits))


@fitted
def rotorquant_allocated_trellis(key: Key, x: Array, bits: int) -> Quantizer:
    """`rotorquant_allocated` with one trellis through all coordinates in the place of levels for each."""
    x, unstack = stack_heads(x)
    return unstack(jax.vmap(_with_trellis)(_transform_codes(key, x, bits), x))


def _transform_codes(key: Key, x: Float[Array, "heads n d"], bits: int) -> Any:
    """`rotorquant_allocated` for each head, stacked."""
    total = check_int("bits", bits, 1, codebooks.MAX_BITS) * x.shape[2]
    keys = random.split(key, len(x))
    rotations = jax.vmap(_decorrelated)(x, keys)
    gain = bool(_needs_gain(rotations, x))
    y, weights, orders = _sorted(rotations, x, gain)
    bits_of = allocate(y.var(axis=1), total + (8 if gain else 16))
    quantizers = _allocated(rotations, orders, y, weights, gain, bits_of)
    train = functools.partial(fit, where=_rotation_and_levels, steps=TRAINING_STEPS, patience=20)
    return jax.vmap(lambda quantizer, x, key: _rounded(train(quantizer, x, key)[0]))(quantizers, x, keys)


def _with_trellis(code: Rotated, x: Float[Array, "n d"]) -> Rotated:
    y, inner = code.rotation(x), code.inner
    if isinstance(inner, Gain):
        y = y / gain_of(nearest_gains(y, inner.weights))[:, None]
    columns: Any = inner.inner if isinstance(inner, Gain) else inner
    trellis = TrellisPerCoordinate.gaussian(y.mean(axis=0), y.std(axis=0), columns.bits)
    return Rotated(code.rotation, Gain(inner.weights, trellis) if isinstance(inner, Gain) else trellis)


def with_lloyd_levels(rotation: Rotation, x: Float[Array, "n d"], bits: int) -> Scaled:
    """Scaled(Rotated(rotation, PerCoordinate)) with Lloyd's levels for the directions of x, not yet trained."""
    return Scaled(Rotated(rotation, PerCoordinate.lloyd(rotation(norms.direction(x)), (bits,) * x.shape[-1])))


def _with_levels(rotation: Callable[[Array, Array], Chain], key: Key, x: Array, bits: int) -> Quantizer:
    """Scaled(Rotated(rotation, PerCoordinate)), rotation and levels trained together."""
    x, unstack = stack_heads(x)
    check_int("bits", bits, 1, codebooks.MAX_BITS)

    def one(key: Key, x: Array) -> Quantizer:
        first, second = random.split(key)
        quantizer = with_lloyd_levels(rotation(first, norms.direction(x)), x, bits)
        return _rounded(fit(quantizer, x, second, where=lambda q: _rotation_and_levels(q.inner), patience=20)[0])

    return unstack(jax.vmap(one)(random.split(key, len(x)), x))


def _decorrelated(x: Float[Array, "n d"], key: Key) -> Chain:
    """Two butterflies on channels sorted by energy, trained for the coding gain of directions."""
    layers = butterfly(None, x.shape[1]).rotations
    start = Chain((Permutation.descending(_energy(norms.direction(x))), *layers, *layers))
    code = Rotated(start, lloyd_max(x.shape[1], 1))  # the loss does not see its levels
    fitted: Any = fit(code, norms.direction(x), key, where=lambda q: q.rotation, loss=CodingGain(), patience=20)[0]
    return fitted.rotation


@operation
def _needs_gain(rotations: Chain, x: Float[Array, "heads n d"]) -> Bool[Array, ""]:
    """True if sizes, each coordinate relative to its deviation, spread twice as far as those of Gaussian vectors."""

    def spread(rotation: Chain, x: Array) -> Array:
        y = rotation(x)
        return jnp.log(jnp.sum(_weights(y) * y**2, axis=1) + 1e-30).std() / 2

    return jax.vmap(spread)(rotations, x).mean() > 2 / math.sqrt(2 * x.shape[2])


@operation
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def _sorted(rotation: Chain, x: Float[Array, "n d"], gain: bool) -> tuple[Array, Array, Permutation]:
    """Rotated vectors over their gain, their coordinates by falling variance; the gain's weights; that order."""
    y = rotation(x)
    weights = _weights(y)
    y = y / gain_of(nearest_gains(y, weights))[:, None] if gain else y
    order = Permutation.descending(y.var(axis=0))
    return order(y), weights[order.indices], order


@operation
@functools.partial(jax.vmap, in_axes=(0, 0, 0, 0, None, None))
def _allocated(
    rotation: Chain, order: Permutation, y: Float[Array, "n d"], weights: Array, gain: bool, bits: tuple[int, ...]
) -> Rotated:
    columns = PerCoordinate.lloyd(y, bits)
    return Rotated(Chain((*rotation.rotations, order)), Gain(weights, columns) if gain else columns)


def _weights(y: Float[Array, "n d"]) -> Float[Array, "d"]:
    """Weights of `Gain`."""
    energy = _energy(y)
    return 1 / (len(energy) * jnp.maximum(energy, 1e-12 * energy.max()))


def _rotation_and_levels(quantizer: Any) -> Any:
    return quantizer.rotation, getattr(quantizer.inner, "inner", quantizer.inner).levels


def _rounded(quantizer: Quantizer) -> Any:
    """Rounds the levels of a quantizer to whole numbers."""
    is_columns = lambda part: isinstance(part, PerCoordinate)  # noqa: E731
    return jax.tree.map(lambda part: part.rounded() if is_columns(part) else part, quantizer, is_leaf=is_columns)


def _energy(x: Float[Array, "n d"]) -> Float[Array, "d"]:
    return (x**2).mean(axis=0)
