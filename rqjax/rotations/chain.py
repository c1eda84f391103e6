"""Rotations one after the other, with permutations between them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from rqjax.lanes import as_float32, assembled
from rqjax.pytree import pytree


@pytree
class Chain:
    """The first rotation acts first."""

    rotations: tuple[Any, ...]

    @property
    def dim(self) -> int:
        return self.rotations[0].dim

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        *first, last = self.rotations
        for rotation in first:
            x = assembled(rotation(x))
        return last(x)

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        for rotation in reversed(self.rotations):
            y = rotation.inverse(y)
        return y


@pytree
class Permutation:
    """x -> x[indices]."""

    indices: Int[Array, "d"]

    @property
    def dim(self) -> int:
        return self.indices.shape[-1]

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return as_float32(x)[..., self.indices]

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return as_float32(y)[..., jnp.argsort(self.indices)]

    @classmethod
    def random(cls, key: Array, dim: int) -> "Permutation":
        return cls(jax.random.permutation(key, dim))
