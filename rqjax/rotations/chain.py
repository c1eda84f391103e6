"""Rotations one after the other, with permutations between them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from rqjax.arrays.planes import as_float32, assembled
from rqjax.core import Key, platforms, pytree, random
from rqjax.rotations.protocol import Rotation


@pytree
class Chain:
    """Rotations one after the other; the first one acts first."""

    rotations: tuple[Rotation, ...]

    blocked = True

    def __post_init__(self):
        if len(dims := {rotation.dim: None for rotation in self.rotations}) != 1:
            raise ValueError(f"expected rotations of one dimension, got {len(self.rotations)} of {[*dims]}")

    @property
    def dim(self) -> int:
        return self.rotations[0].dim

    @property
    def cost(self) -> int:
        return sum(rotation.cost for rotation in self.rotations)

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

    blocked = False

    @property
    def dim(self) -> int:
        return self.indices.shape[-1]

    @property
    def cost(self) -> int:
        return 0

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return as_float32(x)[..., self.indices]

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        places = jnp.arange(len(self.indices), dtype=self.indices.dtype)
        return as_float32(y)[..., jnp.zeros_like(places).at[self.indices].set(places)]

    @classmethod
    @platforms.made_on_host
    def random(cls, key: Key, dim: int) -> "Permutation":
        return cls(random.permutation(key, dim))

    @classmethod
    def descending(cls, energy: Float[Array, "d"]) -> "Permutation":
        """Sorts channels by their energy, the loudest first."""
        return cls(jnp.argsort(-energy))

    @classmethod
    def balanced(cls, energy: Float[Array, "d"], groups: Int[np.ndarray, "g k"]) -> "Permutation":
        """Deals channels out so that loud ones share a group with quiet ones.

        The channels are dealt out by their energy: the loudest one to each group, the next ones in the opposite order,
        and so on. The quietest go to the coordinates that no group has.

        Args:
          energy: mean square of each channel.
          groups: coordinates of each group of a rotation, as in `Rotor.groups`.
        """
        count, size = groups.shape
        rank = np.arange(count * size).reshape(size, count)
        rank[1::2] = rank[1::2, ::-1]
        ranks = np.full(energy.shape[-1], -1)
        ranks[groups.T] = rank
        ranks[ranks < 0] = np.arange(count * size, len(ranks))
        return cls(jnp.argsort(-energy)[ranks])
