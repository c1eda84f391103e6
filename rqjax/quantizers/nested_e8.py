"""A nested lattice code: points of the lattice E8 within one cell of a copy that is 2^b times as large.

Sources: Conway & Sloane, 1983, A fast encoding method for lattice codes and quantizers; NestQuant (Savkin et al., 2025,
arXiv:2502.09720), which gives each eight coordinates the best of a few scales.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer, UInt8

from rqjax.arrays import blocks, streams
from rqjax.arrays.gosset import residues, total
from rqjax.arrays.levels import look_up
from rqjax.arrays.planes import as_float32, materialized, pad_to
from rqjax.core import Vectors, check_int, check_vectors, platforms, pytree, static
from rqjax.scoring.ring_codes import Part, RingCodes

SCALES = np.array([3, 4, 5, 7], np.int8)
"""Scales of eight coordinates, in two bits, near the best ratios for Gaussian ones. Points times these are whole
numbers."""
OFFSET = (1, 0, 0, 0, 0, 0, 0, 1)
"""Offset of all points, in halves: fewer of them lie between cells, where a code decodes to a point of the far side."""
STEPS = (0.2924, 0.1336, 0.0657, 0.0329, 0.01674, 0.00839, 0.00421, 0.00211)
"""Steps for coordinates of variance 1, of 1 to 8 bits."""
ROWS = 1024
"""Vectors that are encoded together, whose coordinates stay in a CPU's cache."""


@pytree
class NestedE8(RingCodes):
    """The nearest point of a nested lattice to each eight coordinates. Codes: streams of bits, uint8 (*n, bytes).

    The coordinates i, i + d / 8, i + 2 d / 8, ... are a point, of b bits each, and share a scale of two bits. That
    makes b + 0.25 bits a coordinate, of whole points, rounded up to whole bytes. Points are whole numbers times `step`.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.NestedE8.gaussian(dim=64, bits=3).bits_per_vector
      208
    """

    step: Float[Array | np.ndarray, ""]
    dim: int = static(kw_only=True)
    bits: int = static(kw_only=True)

    def __post_init__(self):
        check_int("bits", self.bits, 1, len(STEPS))

    def encode(self, x: Vectors) -> UInt8[Array, "*n bytes"]:
        x = as_float32(check_vectors(x, self.dim))
        codes = blocks.in_blocks(self._encode, x.reshape(math.prod(x.shape[:-1]), self.dim), rows=ROWS)
        return codes.reshape(*x.shape[:-1], codes.shape[-1])

    def decode(self, codes: UInt8[Array, "*n bytes"]) -> Float[Array, "*n d"]:
        levels = streams.by_rows(lambda rows: materialized(self.levels(streams.windows(rows, self.ends))), codes)
        return levels * self.unit

    @property
    def ends(self) -> np.ndarray:
        """Ends of codes in the stream: of each coordinate's code, point by point, and then of each point's scale."""
        plane, lane = np.divmod(np.arange(8 * self._lanes), self._lanes)
        scales = 8 * self._lanes * self.bits + 2 * np.arange(1, self._lanes + 1)
        return np.concatenate([(8 * lane + plane + 1) * self.bits, scales])

    @property
    def fine(self) -> bool:
        """True if levels fill 16 bits: products are taken with their high bytes first."""
        return self.bits > 3

    @property
    def unit(self) -> Float[Array | np.ndarray, ""]:
        """Unit of levels."""
        return self.step / self._filling

    def levels(self, windows: UInt8[Array, "*n codes t"]) -> Integer[Array, "*n d t"]:
        """Coordinates in units of `unit`, of the windows that end at `ends`."""
        dtype = jnp.int8 if not self.fine else jnp.int32 if platforms.on_apple() else jnp.int16
        *codes, scales = jnp.split(materialized(windows), self._lanes * np.arange(1, 9), axis=-2)
        points = self._points([(code >> (8 - self.bits)).astype(dtype) for code in codes], keep=materialized)
        scales = look_up(scales >> 6, jnp.asarray(SCALES)).astype(dtype) * self._filling
        return jnp.concatenate([x * scales for x in points], axis=-2)[..., : self.dim, :]

    @property
    def in_integers(self) -> bool:
        return True

    @property
    def width(self) -> int:
        return 4  # with the intermediate numbers of a block's points

    @property
    def parts(self) -> list[Part]:
        return [Part(slice(0, self.dim), self.ends, jnp.broadcast_to(self.unit, self.dim), self.levels, self.fine)]

    def stream(self, codes: UInt8[Array, "b h t bytes"]) -> UInt8[Array, "b h rows t"]:
        return jnp.swapaxes(codes, 2, 3)

    @classmethod
    def gaussian(cls, dim: int, bits: int, *, variance: float | int = 1) -> "NestedE8":
        """Makes the code for Gaussian coordinates; 1 to 8 bits."""
        step = STEPS[check_int("bits", bits, 1, len(STEPS)) - 1] * math.sqrt(variance)
        return cls(jnp.float32(step), dim=dim, bits=bits)

    @property
    def _filling(self) -> int:
        return 2 ** (11 - self.bits) if self.fine else 1

    @property
    def _lanes(self) -> int:
        return -(-self.dim // 8)

    def _encode(self, x: Float[Array, "n d"]) -> UInt8[Array, "n bytes"]:
        y = list(materialized(pad_to(x / self.step, 8 * self._lanes).T).reshape(8, self._lanes, len(x)))
        # the last try is sure to be in the cell: it is shrunk until it is as far from the boundary as a point may be
        reach = 2 * float(SCALES[-1]) * (2**self.bits / math.sqrt(2) - 1)
        shrunk = materialized(jnp.minimum(1, reach / jnp.sqrt(jnp.maximum(total([v * v for v in y]), 1e-20))))
        errors = []
        for scale, factor in [*((scale, 1) for scale in SCALES.astype(np.float32)), (np.float32(SCALES[-1]), shrunk)]:
            points = self._points(self._codes(_places([v * factor for v in y], scale)))
            rest = [v - scale * point for v, point in zip(y, points, strict=True)]
            errors.append(total([r * r for r in rest]))
        best = functools.reduce(jnp.minimum, errors)
        ranks = [jnp.where(error == best, i, len(SCALES)) for i, error in enumerate(errors)]
        tried = materialized(functools.reduce(jnp.minimum, ranks))
        chosen = jnp.minimum(tried, len(SCALES) - 1)
        factor = jnp.where(tried == len(SCALES), shrunk, 1)
        codes = self._codes(_places([v * factor for v in y], jnp.asarray(SCALES, jnp.float32)[chosen]))
        scales = streams.pack(chosen, (2,) * self._lanes)
        return jnp.concatenate([self._packed(codes).reshape(self._lanes * self.bits, len(x)), scales]).T

    def _packed(self, codes: list[Int32[Array, "lanes n"]]) -> UInt8[Array, "lanes bits n"]:
        """The codes of points, one point after the other.

        The codes go by way of words of 32 bits: otherwise each of eight arrays would compute again what the eight codes
        share.
        """
        together = 8 if self.bits <= 4 else 4
        shifted = [code << (self.bits * (k % together)) for k, code in enumerate(codes)]
        words = [materialized(total(shifted[k : k + together])) for k in range(0, 8, together)]
        size, octets = self.bits * together, []
        for start in range(0, 8 * self.bits, 8):
            word, shift = divmod(start, size)
            octet = words[word] >> shift
            octets.append(octet | words[word + 1] << (size - shift) if shift + 8 > size else octet)
        return jnp.stack([octet.astype(jnp.uint8) for octet in octets], axis=1)

    def _codes(self, places: list[Float[Array, "lanes n"]]) -> list[Int32[Array, "lanes n"]]:
        """The codes of the nearest points: their coordinates in a basis of E8, modulo 2^b."""
        rest = residues(places, [jnp.floor(place + 0.5).astype(jnp.int32) for place in places], 1)
        doubled = [jnp.round(2 * (place - r)).astype(jnp.int32) for place, r in zip(places, rest, strict=True)]
        last = doubled[7]
        *first, seventh = [(x - last) >> 1 for x in doubled[:7]]
        return [code & (2**self.bits - 1) for code in (*first, (seventh - total(first)) >> 1, last)]

    def _points(self, codes: list[Integer[Array, "*n"]], **options) -> list[Integer[Array, "*n"]]:
        """Decodes codes to points in the cell, in halves."""
        *first, seventh, last = codes
        doubled = [2 * code + last for code in (*first, 2 * seventh + total(first))] + [last]
        doubled = [x - shift for x, shift in zip(doubled, OFFSET, strict=True)]
        whole = [(x + 2**self.bits) >> (self.bits + 1) for x in doubled]
        return residues(doubled, whole, 2 ** (self.bits + 1), **options)


def _places(
    y: list[Float[Array, "lanes n"]], scale: np.floating | Float[Array, "lanes n"]
) -> list[Float[Array, "lanes n"]]:
    """Positions of coordinates in E8, in units of steps."""
    return [v * (0.5 / scale) + shift / 2 for v, shift in zip(y, OFFSET, strict=True)]
