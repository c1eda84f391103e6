"""A scalar quantizer with levels, and bits, of each coordinate's own, as a transform code needs it."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped, UInt8, UInt32

from rqjax import codebooks
from rqjax.arrays import streams
from rqjax.arrays.levels import look_up, nearest
from rqjax.arrays.planes import as_float32, pad_to
from rqjax.core import Vectors, check_vectors, pytree
from rqjax.scoring.ring_codes import Part, RingCodes

SELECTED = 64
"""Most levels of a coordinate that are looked up by selections, not loads."""
PRIOR = 8.0
"""Pseudo-count of the prior: an initial level weighs as much as eight samples."""


@pytree
class Whole:
    """Levels of each coordinate in whole numbers, so that products with codes can be taken in integers:
    `center + step * levels`."""

    levels: Shaped[Array | np.ndarray, "*heads k m"]
    """Whole numbers in int8; above 4 bits in int16."""
    center: Float[Array | np.ndarray, "*heads m"]
    step: Float[Array | np.ndarray, "*heads m"]

    @classmethod
    def of(cls, levels: Float[Array, "k m"]) -> "Whole":
        """Rounds levels to a 254th of their range; above 4 bits to a 65,278th."""
        largest, dtype = (127, jnp.int8) if len(levels) <= 16 else (32_639, jnp.int16)
        center = (levels[0] + levels[-1]) / 2
        step = (levels[-1] - levels[0]) / (2 * largest)
        return cls(jnp.round((levels - center) / jnp.where(step > 0, step, 1)).astype(dtype), center, step)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.levels.shape

    @property
    def values(self) -> Float[Array, "k m"]:
        return jnp.asarray(self.center) + self.step * jnp.asarray(self.levels)


@pytree
class PerCoordinate(RingCodes):
    """Nearest level of each coordinate. Codes: packed indices, uint8 (*n, bytes).

    Coordinates come in classes of equal bits, most bits first: class c has `levels[c]` (2**bits, size), ascending in
    each column; a class of no bits has one level. The indices are packed by `streams.pack`. Caches take products with
    `rounded` levels without decoding.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.PerCoordinate.gaussian(jnp.zeros(8), jnp.ones(8), bits=(4, 4, 2, 2, 1, 1, 0, 0))
      >>> q.bits_per_vector
      16
    """

    levels: tuple[Float[Array | np.ndarray, "_ _"] | Whole, ...]

    def __post_init__(self):
        bits = [_bits(levels) for levels in self.levels]
        if not bits or any(2**b != levels.shape[-2] for b, levels in zip(bits, self.levels, strict=True)):
            raise ValueError(f"expected powers of two of levels, got shapes {[x.shape for x in self.levels]}")
        if bits != sorted(bits, reverse=True):
            raise ValueError(f"expected the classes of most bits first, got {bits} bits")

    @property
    def dim(self) -> int:
        return sum(levels.shape[-1] for levels in self.levels)

    @property
    def bits(self) -> tuple[int, ...]:
        """Bits of each coordinate, descending."""
        return tuple(_bits(levels) for levels in self.levels for _ in range(levels.shape[-1]))

    @property
    def active(self) -> list[int]:
        """Bits of the coordinates that have any."""
        return [b for b in self.bits if b]

    def encode(self, x: Vectors) -> UInt8[Array, "*n bytes"]:
        indices = self.nearest(as_float32(check_vectors(x, self.dim)))
        return streams.pack_vectors(indices, self.active)

    def decode(self, codes: UInt8[Array, "*n bytes"]) -> Float[Array, "*n d"]:
        return self.values(self.indices(codes))

    def indices(self, codes: UInt8[Array, "*n bytes"]) -> UInt32[Array, "*n d"]:
        """Index of the level of each coordinate."""
        active = streams.unpack_vectors(codes, self.active)
        return pad_to(active.astype(jnp.uint32), self.dim)

    def nearest(self, x: Float[Array, "*n d"]) -> UInt32[Array, "*n d"]:
        """The index of the level nearest to each coordinate."""
        return self._by_class(nearest, x)

    def values(self, indices: Integer[Array, "*n d"]) -> Float[Array, "*n d"]:
        """The levels of indices."""
        return self._by_class(lambda x, levels: levels[x, jnp.arange(levels.shape[-1])], indices)

    def split(self, x: Array) -> list[Array]:
        """The coordinates of each class."""
        return jnp.split(x, np.cumsum([levels.shape[-1] for levels in self.levels])[:-1], axis=-1)

    @property
    def tables(self) -> list[Float[Array, "_ _"]]:
        """The levels of each class in the units of the vectors."""
        return [levels.values if isinstance(levels, Whole) else jnp.asarray(levels) for levels in self.levels]

    @property
    def in_integers(self) -> bool:
        return bool(self.bits[0]) and all(isinstance(levels, Whole) for levels in self.levels)

    @property
    def parts(self) -> list[Part]:
        found, start, ends = [], 0, np.cumsum(self.active)
        for levels in self.levels:
            assert isinstance(levels, Whole)
            size, bits = levels.shape[1], _bits(levels)
            some = slice(start, start + size)
            if bits:
                of = functools.partial(_of_rows, bits, levels.levels)
                found.append(Part(some, ends[some], levels.step, of, levels.levels.dtype == jnp.int16, bits))
            start = some.stop
        return found

    @property
    def center(self) -> Float[Array, "d"]:
        return jnp.concatenate([levels.center for levels in self.levels if isinstance(levels, Whole)])

    def stream(self, codes: UInt8[Array, "b h t bytes"]) -> UInt8[Array, "b h rows t"]:
        return jnp.swapaxes(codes, 2, 3)

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        return jnp.concatenate(list(map(leaf, self.split(x), self.tables)), axis=-1)

    def rounded(self) -> "PerCoordinate":
        """Returns the quantizer with levels in whole numbers."""
        return PerCoordinate(tuple(map(Whole.of, self.tables)))

    def _by_class(self, function, x: Array) -> Array:
        return jnp.concatenate(list(map(function, self.split(x), self.tables)), axis=-1)

    @classmethod
    def gaussian(cls, mean: Float[Array, "d"], deviation: Float[Array, "d"], bits: tuple[int, ...]) -> "PerCoordinate":
        """Lloyd-Max levels of Gaussian coordinates; `bits` of each, descending."""
        levels, start = [], 0
        for b in sorted(set(bits), reverse=True):
            stop = start + bits.count(b)
            unit = codebooks.gaussian(b) if b else np.zeros(1)
            levels.append(mean[start:stop] + deviation[start:stop] * jnp.asarray(unit, jnp.float32)[:, None])
            start = stop
        return cls(tuple(levels))

    @classmethod
    def lloyd(cls, x: Float[Array, "n d"], bits: tuple[int, ...], *, iterations: int = 20) -> "PerCoordinate":
        """Levels for samples: Lloyd's iterations from those of Gaussian coordinates, which stay in as a prior.

        Args:
          x: samples, as many as there are.
          bits: bits of each coordinate, descending.
          iterations: number of Lloyd's iterations.
        """
        prior = cls.gaussian(x.mean(axis=0), x.std(axis=0), bits)

        def step(_, learned):
            def one(x, levels, before):
                place = nearest(x, levels), jnp.arange(levels.shape[-1])
                count = jnp.zeros_like(levels).at[place].add(1)
                total = jnp.zeros_like(levels).at[place].add(x)
                return jnp.sort((total + PRIOR * before) / (count + PRIOR), axis=0)

            return cls(tuple(map(one, prior.split(x), learned.levels, prior.levels)))

        return lax.fori_loop(0, iterations, step, prior)


def _of_rows(
    bits: int, levels: Shaped[Array | np.ndarray, "k n"], windows: UInt8[Array, "b h n t"]
) -> Shaped[Array, "b h n t"]:
    indices = windows >> (8 - bits)
    if len(levels) <= SELECTED:
        return look_up(indices, jnp.asarray(levels)[..., None])
    return jax.vmap(lambda row, index: row[index], (1, 2), 2)(jnp.asarray(levels), indices)


def _bits(levels: Float[Array | np.ndarray, "*heads k m"] | Whole) -> int:
    return (levels.shape[-2] - 1).bit_length()
