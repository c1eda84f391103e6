"""Levels of scalar quantizers: the nearest one of a number, and the levels of indices."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8, UInt32


def nearest(
    x: Shaped[Array, "*n d"],
    levels: Float[Array, "k *#d"],
    scale: Float[Array, "*n 1"] | None = None,
    *,
    symmetric: bool = False,
) -> UInt32[Array, "*n d"]:
    """The index of the level that is nearest to each coordinate of `x / scale`.

    Args:
      x: numbers.
      levels: ascending, 2**bits for all coordinates, or (2**bits, d) for each its own.
      scale: scale of each vector; 1 if not given.
      symmetric: whether `levels[::-1] == -levels`; it halves the comparisons.
    """
    boundaries, bits = (levels[1:] + levels[:-1]) / 2, (len(levels) - 1).bit_length()

    def above(x, boundary):
        return x > (boundary if scale is None else boundary * scale)

    def count(x, boundaries):
        return sum((above(x, boundary).astype(jnp.uint32) for boundary in boundaries), jnp.zeros(x.shape, jnp.uint32))

    if bits > 4:  # binary search
        index, column = jnp.zeros(x.shape, jnp.uint32), [jnp.arange(size) for size in levels.shape[1:]]
        for bit in reversed(range(bits)):
            index = jnp.where(above(x, boundaries[index + (2**bit - 1), *column]), index + 2**bit, index)
        return index
    if not symmetric:
        return count(x, boundaries)
    half = 2 ** (bits - 1) - 1  # count on |x|; m ^ half is half - m, m ^ (half + 1) is half + 1 + m
    return count(jnp.abs(x), boundaries[half + 1 :]) ^ jnp.where(x < 0, jnp.uint32(half), jnp.uint32(half + 1))


def look_up(
    indices: UInt8[Array, "..."], levels: Shaped[Array, "k ..."], *, symmetric: bool = False
) -> Shaped[Array, "..."]:
    """Looks up `levels[indices]` by selections: a CPU vectorizes these, but not a gather.

    Levels are int8 or int16. Their axes after the first broadcast to the last axes of the indices.
    """
    if symmetric:
        half = levels.shape[0] // 2
        return mirrored(indices, half, lambda upper: look_up(upper, levels[half:]))
    if levels.shape[0] == 1:
        return jnp.broadcast_to(levels[0], indices.shape)
    half = levels.shape[0] // 2
    return jnp.where((indices & half) != 0, look_up(indices, levels[half:]), look_up(indices, levels[:half]))


def mirrored(
    indices: UInt8[Array, "..."], middle: int, of_upper: Callable[[Array], Shaped[Array, "..."]]
) -> Shaped[Array, "..."]:
    """Extends `of_upper`, a function of the indices from `middle` on, to all indices as an odd function.

    An index below `middle` has minus the value of its mirror image. Values are whole numbers; `middle` is a power of
    two, and `of_upper` may use only the bits below it.
    """
    flip = (indices >= middle).astype(jnp.uint8) - 1  # all bits set below the middle
    sizes = of_upper(indices ^ flip)
    sign = lax.bitcast_convert_type(flip, jnp.int8).astype(sizes.dtype)
    return (sizes ^ sign) - sign


def divide(a: Float[Array, "*n"], b: Float[Array, "..."] | int) -> Float[Array, "*n"]:
    """Divides a by b, correctly rounded. XLA divides by a broadcast b by multiplying with 1 / b, which would break
    ties."""
    return a / (b + 0 * a)
