"""The Gosset lattice E8, elementwise: the eight coordinates of a point lie in eight arrays.

A point of E8 has eight integers, or eight halves of odd integers, whose sum is even.

Source: Conway & Sloane, 1982, Fast quantizing and decoding algorithms for lattice quantizers.
"""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Integer, Shaped


def total(parts: list[Array]) -> Array:
    """Sums a list of arrays."""
    return functools.reduce(operator.add, parts)


def residues(
    y: list[Shaped[Array, "..."]],
    whole: list[Integer[Array, "..."]],
    unit: int,
    keep: Callable[[Array], Array] = lambda choice: choice,
) -> list[Shaped[Array, "..."]]:
    """Subtracts from y the nearest point of `unit` times E8.

    Args:
      y: eight coordinates, floats, or whole numbers if `unit` is even.
      whole: the nearest integer to each coordinate, in multiples of `unit`.
      unit: factor of E8.
      keep: function applied to the choice of the nearest point, which all coordinates share.
    """
    rest = [v - (unit * w).astype(v.dtype) for v, w in zip(y, whole, strict=True)]
    size = [jnp.abs(v) for v in rest]
    largest, smallest = functools.reduce(jnp.maximum, size), functools.reduce(jnp.minimum, size)
    # Where the sum is odd, one coordinate is rounded the other way: the one whose error grows least.
    odd = (total(whole) & 1) == 1
    odd_halves = odd ^ ((total([(v < 0).astype(jnp.int8) for v in rest]) & 1) == 1)
    zero = jnp.zeros_like(largest)
    farther = 2 * unit - total(size) + jnp.where(odd_halves, 2 * smallest, zero)  # half the difference of squares
    halves = farther < jnp.where(odd, unit - 2 * largest, zero)
    moved, extreme = jnp.where(halves, odd_halves, odd), jnp.where(halves, smallest, largest)
    index = jnp.full(extreme.shape, 8, jnp.uint8)
    for k in reversed(range(8)):
        index = jnp.where(size[k] == extreme, jnp.uint8(k), index)
    choice = keep(jnp.where(moved, index, jnp.uint8(8)) | jnp.where(halves, jnp.uint8(16), jnp.uint8(0)))
    halves, index = choice >= 16, choice & 15

    def moved_by(k: int, value: Array) -> Array:
        of_whole = jnp.where(index == k, unit, 0)
        of_halves = jnp.where(index == k, -unit / 2, unit / 2)
        by = jnp.where(halves, of_halves, of_whole).astype(value.dtype)
        return jnp.where(value < 0, value + by, value - by)

    return [moved_by(k, value) for k, value in enumerate(rest)]
