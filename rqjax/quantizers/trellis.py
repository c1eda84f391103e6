"""Trellis-coded quantization: the level of a coordinate depends on its own b bits and on those before them.

The trellis is a bit-shift trellis (Mao, Gray and Linder 2010; QTIP 2024): the level is a function of the last L bits of
the stream of codes, so that all coordinates decode at once. The stream is a ring (Forney's tail-biting), so that d
coordinates take d b bits.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped, UInt8, UInt32

from rqjax.arrays import blocks, packing, viterbi
from rqjax.arrays.planes import as_float32, pad_to
from rqjax.arrays.viterbi import Segment
from rqjax.codebooks.trellis_tables import Companded, Table
from rqjax.core import Vectors, check_int, check_vectors, platforms, pytree, static
from rqjax.scoring.ring_codes import Part, RingCodes


@pytree
class Trellis(RingCodes):
    """The path through the trellis that is nearest to a vector. Codes: packed indices, uint32 (*n, words).

    Time runs through the fields of `packing`'s lanes: the coordinate in plane k and lane j is at time 8 j + k. Where 8
    does not divide d, the padding of the last planes carries codes, too, which stand for nothing.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.trellis_coded(dim=64, bits=2).encode(jnp.ones((5, 64)) / 8).shape  # words
      (5, 4)
    """

    table: Table | Companded
    dim: int = static(kw_only=True)
    bits: int = static(kw_only=True)

    def __post_init__(self):
        check_int("bits", self.bits, 1, 8)
        check_int("state_bits", self.table.state_bits, self.bits, min(16, 8 * self._lanes * self.bits))

    @property
    def in_integers(self) -> bool:
        """True if levels come from arithmetic in int8, which caches lay codes out for."""
        return isinstance(self.table, Companded) and self.table.whole

    @property
    def values(self) -> Float[Array, "S"]:
        """Level of each state, in the units of the vectors."""
        return self._values(jnp.arange(2**self.table.state_bits, dtype=jnp.uint32))

    def encode(self, x: Vectors) -> UInt32[Array, "*n words"]:
        return by_rows(self._encode, check_vectors(x, self.dim), self.table.state_bits)

    def states(self, codes: UInt32[Array, "*n words"]) -> Integer[Array, "*n d"]:
        """The state of each coordinate: a window that slides over the stream."""
        packing.check_width(codes, packing.words_per_vector(self.dim, self.bits))
        if self.bits > 4:
            lead, times = codes.shape[:-1], 8 * self._lanes
            in_time = self._in_lanes(codes).reshape(*lead, times)
            states = viterbi.windows(in_time, (self.bits,) * times, self.table.state_bits)
            return jnp.swapaxes(states.reshape(*lead, self._lanes, 8), -2, -1).reshape(*lead, times)[..., : self.dim]
        lanes, size = packing.unpack_lanes(codes, self.bits, self._lanes), self.table.state_bits
        lanes = lanes.astype(jnp.uint16) if self.bits <= 2 else lanes  # twice as many fit in a register
        dtype = jnp.uint8 if size <= 8 else jnp.uint16

        def plane(k: int) -> Integer[Array, "*n lanes"]:
            state, missing = jnp.zeros_like(lanes), size - self.bits * (k + 1)
            for back in range(1 + max(0, -(-missing // (8 * self.bits)))):  # its own lane and those before it
                lane, shift = jnp.roll(lanes, back, axis=-1), 8 * self.bits * back - missing
                state = state | (lane >> shift if shift >= 0 else lane << -shift)
            return (state & (2**size - 1)).astype(dtype)

        return jnp.concatenate([plane(k) for k in range(8)], axis=-1)[..., : self.dim]

    def decode(self, codes: UInt32[Array, "*n words"]) -> Float[Array, "*n d"]:
        return self._values(self.states(codes))

    @property
    def parts(self) -> list[Part]:
        plane, lane = np.divmod(np.arange(self.dim), self._lanes)
        ends = (8 * lane + plane + 1) * self.bits
        return [Part(slice(0, self.dim), ends, jnp.broadcast_to(self.table.step, self.dim), self.table, fine=False)]

    def stream(self, codes: UInt32[Array, "b h t words"]) -> UInt8[Array, "b h rows t"]:
        """Lays lanes of `packing` out as a stream: each has the codes of eight coordinates that follow each other."""
        if self.bits > 4:
            words = packing.pack_stream(self._in_lanes(codes), self.bits)
        else:
            words = packing.unpack_lanes(codes, self.bits, self._lanes)[..., None]
        octets = lax.bitcast_convert_type(words, jnp.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
        octets = octets[..., : self.bits]
        return jnp.swapaxes(octets.reshape(*codes.shape[:-1], self._lanes * self.bits), 2, 3)

    def _in_lanes(self, codes: UInt32[Array, "*n words"]) -> UInt32[Array, "*n lanes 8"]:
        planes = packing.unpack(codes, self.bits, 8 * self._lanes)
        return jnp.swapaxes(planes.reshape(*codes.shape[:-1], 8, self._lanes), -2, -1)

    def _values(self, states: Integer[Array, "*n d"]) -> Float[Array, "*n d"]:
        return self.table(states) * self.table.step

    @property
    def _lanes(self) -> int:
        return -(-self.dim // 8)

    def _encode(self, x: Shaped[Array, "n d"]) -> UInt32[Array, "n words"]:
        count, times = len(x), 8 * self._lanes
        x = pad_to(as_float32(x).astype(jnp.float32), times)  # the search needs spare bits of float32's in its costs
        y = x.reshape(count, 8, self._lanes).transpose(2, 1, 0).reshape(times, count)
        weights = None
        if self.dim % 8:
            weights = (jnp.arange(times) < self.dim).reshape(8, self._lanes).T.reshape(times).astype(jnp.float32)
        codes = viterbi.tail_biting([Segment(y, self.values.astype(jnp.float32)[None], (self.bits,), weights)])
        planes = codes.reshape(self._lanes, 8, count).transpose(1, 2, 0).astype(jnp.uint32)
        return packing.pack_planes(list(planes), self.bits)


def by_rows(encode: Callable[[Array], Array], x: Shaped[Array, "*n d"], state_bits: int) -> Shaped[Array, "*n size"]:
    """Applies `encode`, which takes vectors (n, d), to vectors with any leading axes, a block at a time. On a CPU the
    costs of a block's states stay in cache; other devices have more processors to keep busy and take larger blocks."""
    lead, rows = x.shape[:-1], max(64, 2 ** (15 - state_bits)) * (1 if platforms.on_cpu() else 128)
    codes = blocks.in_blocks(encode, x.reshape(math.prod(lead), x.shape[-1]), rows=rows)
    return codes.reshape(*lead, codes.shape[-1])
