"""A transform code without training: principal axes, bits by variance, one trellis through all coordinates."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rqjax import codebooks
from rqjax.arrays import norms
from rqjax.codebooks import MAX_BITS, trellis_tables
from rqjax.core import Key, Quantizer, check_int, operation, random
from rqjax.quantizers.combinators import Rotated, Scaled
from rqjax.quantizers.per_head import stack_heads
from rqjax.quantizers.trellis_per_coordinate import TrellisPerCoordinate
from rqjax.recipes.allocation import allocate
from rqjax.recipes.fitted import fitted
from rqjax.recipes.methods import turboquant_trellis
from rqjax.rotations import Dense

MIXED_COORDINATES = (8, 32)
"""Principal coordinates that a random rotation mixes."""
WORTH = 0.97
"""Share of the error of `turboquant_trellis`, which decodes faster, below which the error of a transform code has to
be."""
ALIKE = 8
"""Neighboring principal coordinates with equal bits. A rotation mixes as many, so their variances are nearly equal, and
the layers of a model have few allocations; programs are compiled for each."""
HELD_OUT = 1024
"""Most held-out vectors, which choose the code; an eighth of all vectors is held out."""
TRELLIS_GAIN = (1, 0.776, 0.644, 0.573, 0.572, 0.584, 0.649, 0.82, 1.017)
"""Error of a trellis over that of Lloyd-Max levels of as many bits, 0 to 8, on Gaussian coordinates."""


@fitted
def klt_trellis(key: Key, x: Array, bits: float | int) -> Quantizer:
    """A Karhunen-Loeve transform, a trellis with bits where the variance is, and the best scale per vector.

    Blocks of neighboring principal coordinates are mixed by random rotations: alone they have heavy tails, and a
    trellis wants Gaussian ones. Held-out vectors choose among `MIXED_COORDINATES`, all of them, and
    `turboquant_trellis`, which mixes all and subtracts no mean. Bits may be fractional.

    The scale is that of the whole vector, not of its residual from a mean. The error is then orthogonal to the vector,
    and nearly so to a query nearby, so that little of it is in the scores of the nearest neighbors.
    """
    x, unstack = stack_heads(x)
    check_int("the whole part of bits", int(bits // 1), 1, MAX_BITS)
    unit = norms.direction(x)
    keys = random.split(key, len(x))
    held = min(HELD_OUT, x.shape[1] // 8)
    train, test = (unit[:, :-held], x[:, -held:]) if held else (unit, x)
    even = float(trellis_tables.PARTS * bits).is_integer()
    codes = [_transform_code(keys, train, bits, block) for block in (x.shape[2], *MIXED_COORDINATES)]
    errors = [_error(code, test) for code in codes]
    if even and WORTH * _error(codes[0], x, learned=False) <= min(errors):
        return unstack(jax.vmap(lambda key: turboquant_trellis(key, x.shape[2], bits))(keys))
    return unstack(codes[errors.index(min(errors))])


def _transform_code(keys: Array, unit: Float[Array, "heads n d"], bits: float | int, block: int) -> Quantizer:
    rotation, mean, deviation = _principal(keys, unit, block)
    columns = functools.partial(TrellisPerCoordinate.gaussian, bits=_allocated(deviation**2, int(bits * unit.shape[2])))
    return Scaled(Rotated(rotation, jax.vmap(columns)(mean, deviation)))


def _allocated(variances: Float[Array, "heads d"], total: int) -> tuple[int, ...]:
    """Allocates bits to `ALIKE` coordinates at a time, or to the most fewer that divide both numbers."""
    size = math.gcd(ALIKE, variances.shape[1], total)
    alike = variances.reshape(len(variances), -1, size).swapaxes(1, 2)
    return tuple(np.repeat(allocate(alike, total // size), size).tolist())


@operation
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def _principal(key: Key, unit: Float[Array, "n d"], block: int) -> tuple[Dense, Array, Array]:
    """Rotation to mixed principal coordinates, by falling variance, with their means and deviations."""
    matrix = Dense.haar(key, unit.shape[1], block=block)(Dense.klt(unit).matrix.T).T
    y = Dense(matrix)(unit)
    order = jnp.argsort(-y.var(axis=0))
    return Dense(matrix[order]), y.mean(axis=0)[order], jnp.maximum(y.std(axis=0)[order], 1e-9)


def _error(code: Any, x: Float[Array, "heads n d"], learned: bool = True) -> float:
    """Relative error of a transform code, measured with Lloyd-Max levels in the place of the trellis.

    The bits of a trellis are compiled in. Running it would take seconds for each code, and each layer of a model has
    other bits. If not `learned`, the error is that of `turboquant_trellis`, which subtracts no mean.
    """
    columns = code.inner.inner
    mean, deviation, bits = columns.mean, columns.deviation, columns.bits
    if not learned:
        mean, deviation = jnp.zeros_like(mean), jnp.full_like(mean, columns.dim**-0.5)
        bits = allocate(deviation**2, sum(bits))
    return float(_errors(code.inner.rotation, mean, deviation, np.array(bits), x).mean())


@operation
@functools.partial(jax.vmap, in_axes=(0, 0, 0, None, 0))
def _errors(
    rotation: Dense,
    mean: Float[Array, "d"],
    deviation: Float[Array, "d"],
    bits: Int[Array, "d"],
    x: Float[Array, "n d"],
) -> Float[Array, ""]:
    levels = np.full((MAX_BITS + 1, 2**MAX_BITS), np.inf, np.float32)
    levels[0, 0] = 0
    for b in range(1, MAX_BITS + 1):
        levels[b, : 2**b] = codebooks.gaussian(b)
    y = (rotation(norms.direction(x)) - mean) / deviation

    def coordinate(y: Float[Array, "n"], bits: Int[Array, ""]) -> Float[Array, ""]:
        own = jnp.asarray(levels)[bits]
        right = jnp.clip(jnp.searchsorted(own, y), 1, own.size - 1)
        return jnp.mean(jnp.minimum(jnp.abs(y - own[right - 1]), jnp.abs(y - own[right])) ** 2)

    return jnp.sum(jax.vmap(coordinate, (1, 0))(y, bits) * deviation**2 * jnp.asarray(TRELLIS_GAIN)[bits])
