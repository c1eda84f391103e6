"""A leaf that rqjax does not know: all that a new one takes."""

import jax
import jax.numpy as jnp

import rqjax
from rqjax.arrays import packing
from rqjax.core import check_vectors
from rqjax.scoring.levels import GroupedLevels


@rqjax.pytree
class Steps(GroupedLevels):
    """Whole steps, relative to the largest magnitude of each vector. Codes: (words, largest)."""

    step: jax.Array
    dim: int = rqjax.static()
    bits: int = rqjax.static(default=4)

    def encode(self, x):
        x = check_vectors(x, self.dim).astype(jnp.float32)
        largest = jnp.abs(x).max(axis=-1, keepdims=True)
        steps = jnp.round(x / jnp.where(largest > 0, largest, 1) / self.step)
        return packing.pack((jnp.clip(steps, -8, 7) + 8).astype(jnp.uint32), self.bits), largest

    def indices(self, codes):
        return packing.unpack(codes[0], self.bits, self.dim)

    def decode(self, codes):
        return self.step * codes[1] * (self.indices(codes).astype(jnp.float32) - 8)

    groups = 1

    def whole(self, indices):
        return indices.astype(jnp.int8) - 8

    def grid(self, largest):
        return self.step * largest, None
