"""Contiguous slices of the last axis: the formulation that XLA fuses into one pass over the vectors.

A vector of dimension d is seen as 8 planes of d / 8 lanes. Rotations mix planes, packing shifts planes; nothing is
transposed or gathered, so neither makes a copy of the vectors.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from rqjax.core import platforms


def widened_slices(x: Shaped[Array, "*n d"]) -> Callable[[int, int], Shaped[Array, "*n cols"]]:
    """The function (i, j) -> x[..., i:j], low-precision floats widened to float32.

    bfloat16 is widened by bit operations after the slice: XLA would convert all of x first, into a copy twice its size.
    """
    if x.dtype == jnp.bfloat16:
        high = lax.bitcast_convert_type(x, jnp.uint16)
        return lambda i, j: lax.bitcast_convert_type(high[..., i:j].astype(jnp.uint32) << 16, jnp.float32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lambda i, j: as_float32(x[..., i:j])
    return lambda i, j: x[..., i:j]


def planes(x: Shaped[Array, "*n d"]) -> list[Shaped[Array, "*n lanes"]]:
    """The 8 planes of the last axis, as `widened_slices`; zeros fill the last ones where 8 does not divide d."""
    lanes, part = -(-x.shape[-1] // 8), widened_slices(x)
    return [pad_to(part(k * lanes, (k + 1) * lanes), lanes) for k in range(8)]


def assembled(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Formulates `x` plane by plane for a consumer that stores it as a whole.

    Rotations return parts of different widths side by side. Consumers that slice never see the seams. A loop that
    stores them all is vectorized only if the parts are equal (on the CPU: 1.7 ms instead of 2.4 ms for 8 MiB).
    """
    return jnp.stack(planes(x), axis=-2).reshape(x.shape) if x.shape[-1] % 8 == 0 else x


def pad_to(x: Shaped[Array, "*n d"], size: int) -> Shaped[Array, "*n size"]:
    """Appends zeros to the last axis until it is `size` long."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def multiply_blocks(
    matrices: Float[Array, "k k lanes"], parts: list[Float[Array, "*n lanes"]]
) -> list[Float[Array, "*n lanes"]]:
    """Multiplies the k coordinates that lane j has in k planes by the j-th k x k matrix."""
    return [functools.reduce(operator.add, [m * part for m, part in zip(row, parts, strict=True)]) for row in matrices]


def materialized(x: Shaped[Array, "..."], after: Shaped[Array, "..."] | None = None) -> Shaped[Array, "..."]:
    """Materializes x once: on a CPU XLA would fuse it into every consumer, which may lose their vectorization.

    A loop whose trip count is a zero known only at run time prevents that; an optimization barrier does not. With
    `after`, arrays of bytes only wait for that array, and are still fused into the code that unpacks them.
    """
    if not platforms.on_cpu():
        return x
    if after is not None and x.dtype == jnp.uint8:
        return x ^ never_true(after).astype(jnp.uint8)
    return _looped(x)


@jax.custom_jvp
def _looped(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    return lax.fori_loop(0, never_true(x).astype(jnp.int32), lambda _, value: value + value, x)


@_looped.defjvp
def _of_tangents(x: tuple[Array], tangent: tuple[Array]) -> tuple[Array, Array]:
    return _looped(*x), tangent[0]


def never_true(x: Shaped[Array, "..."]) -> Bool[Array, ""]:
    """Computes False from any data, NaN included, once `x` is known. The compiler cannot fold it: it does not know that
    32 bits have at most 32 ones. jax-metal cannot count bits."""
    one = x[tuple(slice(1) for _ in x.shape)]  # to ravel x would copy it
    return (lax.population_count(as_bits(one)) > 8 * x.dtype.itemsize).any()


def as_bits(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """The bits of numbers, as unsigned integers of their size."""
    kinds = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
    return lax.bitcast_convert_type(x, kinds[x.dtype.itemsize])


def put(x: Shaped[Array, "..."], at: Any, new: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Writes `new` into x at some places and drops those out of range. Floats of 16 bits are moved as bits: XLA's CPU
    backend writes a bfloat16 by way of a float32 copy of the whole."""
    return _moved(lambda at, x, new: x.at[at].set(new, mode="drop"), at, x, new.astype(x.dtype))


def pick(x: Shaped[Array, "..."], at: Any) -> Shaped[Array, "..."]:
    """Entries of x at some places, moved as `put` moves them."""
    return _moved(lambda at, x: x[at], at, x)


def part(x: Shaped[Array, "n ..."], start: Array | int, size: int) -> Shaped[Array, "size ..."]:
    """`size` entries of x from `start` on, moved as `put` moves them."""
    return _moved(lambda start, x: lax.dynamic_slice_in_dim(x, start, size), start, x)


def _moved(move: Callable[..., Array], at: Any, *arrays: Array) -> Array:
    """Moves numbers of arrays of one dtype. Bits have no derivative; it is that of moving the numbers."""
    dtype = arrays[0].dtype
    if dtype.itemsize != 2 or not jnp.issubdtype(dtype, jnp.floating):
        return move(at, *arrays)
    leaves, structure = jax.tree.flatten(at)
    traced = [leaf for leaf in leaves if not isinstance(leaf, slice)]

    def place(traced: list[Any]) -> Any:
        others = iter(traced)
        return structure.unflatten([leaf if isinstance(leaf, slice) else next(others) for leaf in leaves])

    @jax.custom_jvp
    def as_numbers(traced, *arrays):
        return lax.bitcast_convert_type(move(place(traced), *map(as_bits, arrays)), dtype)

    @as_numbers.defjvp
    def derivative(primals, tangents):
        at = place(primals[0])
        return as_numbers(*primals), jax.jvp(lambda *arrays: move(at, *arrays), primals[1:], tangents[1:])[1]

    return as_numbers(traced, *arrays)


def as_float32(x: Shaped[Array, "*n"]) -> Float[Array, "*n"]:
    """Low-precision floats as float32; float32 and float64 as they are."""
    return x.astype(jnp.float32 if x.dtype.itemsize < 4 else jnp.promote_types(x.dtype, jnp.float32))
