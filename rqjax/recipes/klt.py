"""A transform code that takes no training: principal axes, bits by variance, one trellis through all coordinates."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rqjax.arrays import norms
from rqjax.codebooks import MAX_BITS
from rqjax.core import Quantizer, check_int, operation
from rqjax.learning.losses import Distortion
from rqjax.quantizers.combinators import Rotated, Scaled
from rqjax.quantizers.per_head import stack_heads
from rqjax.quantizers.trellis_per_coordinate import TrellisColumns
from rqjax.recipes.allocation import allocate
from rqjax.recipes.fitted import fitted
from rqjax.recipes.methods import turboquant_trellis
from rqjax.rotations import Dense

MIXED_COORDINATES = (8, 32)
"""Principal coordinates that a random rotation mixes."""
WORTH = 0.98
"""Of the error of `turboquant_trellis`, which decodes faster, that a transform code has to be below."""
HELD_OUT = 1024
"""Vectors at most that decide, an eighth of all."""


@fitted
def klt_trellis(key: Array, x: Array, bits: float | int) -> Quantizer:
    """A Karhunen-Loeve transform, a trellis with bits where the variance is, and the best scale per vector.

    Blocks of neighboring principal coordinates are mixed by random rotations: alone they have heavy tails, and a
    trellis wants Gaussian ones. Held-out vectors choose among `MIXED_COORDINATES` and `turboquant_trellis`, which
    mixes all. Bits may be fractional.

    The scale is that of the whole vector, not of what is left of a mean: the error is then orthogonal to the vector,
    and nearly so to a query nearby, so that little of it is in the scores of the nearest neighbors.
    """
    x, unstack = stack_heads(x)
    check_int("the whole part of bits", int(bits // 1), 1, MAX_BITS)
    unit = norms.direction(x)
    keys = jax.random.split(key, len(x))
    held = min(HELD_OUT, x.shape[1] // 8)
    train, test = (unit[:, :-held], x[:, -held:]) if held else (unit, x)
    if float(bits).is_integer():
        mixed = jax.vmap(lambda key: turboquant_trellis(key, x.shape[2], bits))(keys)
    else:  # in whole bytes, not words
        mixed = _transform_code(keys, train, bits, x.shape[2])
    codes = [mixed, *(_transform_code(keys, train, bits, block) for block in MIXED_COORDINATES)]
    errors = [WORTH * _error(mixed, test), *(_error(code, test) for code in codes[1:])]
    return unstack(codes[errors.index(min(errors))])


def _transform_code(keys: Array, unit: Float[Array, "heads n d"], bits: float | int, block: int) -> Quantizer:
    rotation, mean, deviation = _principal(keys, unit, block)
    columns = functools.partial(TrellisColumns.gaussian, bits=allocate(deviation**2, int(bits * unit.shape[2])))
    return Scaled(Rotated(rotation, jax.vmap(columns)(mean, deviation)), "mse")


@operation
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def _principal(key: Array, unit: Float[Array, "n d"], block: int) -> tuple[Dense, Array, Array]:
    """The rotation to mixed principal coordinates, by falling variance; their means and deviations."""
    matrix = Dense.haar(key, unit.shape[1], block)(Dense.klt(unit).matrix.T).T
    y = Dense(matrix)(unit)
    order = jnp.argsort(-y.var(axis=0))
    return Dense(matrix[order]), y.mean(axis=0)[order], jnp.maximum(y.std(axis=0)[order], 1e-9)


def _error(code: Quantizer, x: Float[Array, "heads n d"]) -> float:
    return float(_errors(code, x).mean())


@operation
@jax.vmap
def _errors(code: Quantizer, x: Float[Array, "n d"]) -> Float[Array, ""]:
    return Distortion()(code, x)
