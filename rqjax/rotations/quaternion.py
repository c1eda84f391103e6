"""Pairs of quaternions in blocks of four coordinates: SO(4) (IsoQuant)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import assembled, multiply_blocks, widened_slices
from rqjax.core import Key, platforms, pytree, random, static
from rqjax.rotations.rotor import Rotor


@pytree
class Quaternion:
    """x_g -> p_g x_g conj(q_g) for each group of four coordinates read as a quaternion; (p, q) covers SO(4).

    With Q = d // 4 the groups are {j, Q + j, 2Q + j, 3Q + j}. A rotor acts on up to three coordinates that are left
    over.
    """

    left: Float[Array, "g 4"]
    right: Float[Array, "g 4"]
    """Quaternions of any length other than zero; they are normalized when used."""
    tail: Rotor
    dim: int = static(kw_only=True)

    blocked = False

    @property
    def cost(self) -> int:
        return 16 * self.left.shape[-2] + self.tail.cost

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return self._apply(x, self._matrices(), self.tail)

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return assembled(self._apply(y, jnp.swapaxes(self._matrices(), 0, 1), self.tail.inverse))

    def _apply(self, x, matrices, rotate_tail) -> Array:
        size, part = self.dim // 4, widened_slices(x)
        blocks = multiply_blocks(matrices, [part(k * size, (k + 1) * size) for k in range(4)])
        tail = [rotate_tail(x[..., 4 * size :])] if self.dim % 4 else []
        return jnp.concatenate([*blocks, *tail], axis=-1)

    def _matrices(self) -> Float[Array, "4 4 g"]:
        """The product of the matrices of x -> p x and x -> x conj(q)."""
        (a, b, c, d), (e, f, g, h) = (v.T / jnp.linalg.norm(v, axis=-1) for v in (self.left, self.right))
        times = jnp.stack([a, -b, -c, -d, b, a, -d, c, c, d, a, -b, d, -c, b, a]).reshape(4, 4, -1)
        over = jnp.stack([e, f, g, h, -f, e, -h, g, -g, h, e, -f, -h, -g, f, e]).reshape(4, 4, -1)
        return sum((times[:, k, None] * over[None, k] for k in range(1, 4)), times[:, 0, None] * over[None, 0])

    @classmethod
    @platforms.made_on_host
    def random(cls, key: Key, dim: int) -> "Quaternion":
        """Uniform (Haar) on SO(4) in each group."""
        left, right, tail = random.split(key, 3)
        shape = (dim // 4, 4)
        return cls(random.normal(left, shape), random.normal(right, shape), Rotor.random(tail, dim % 4), dim=dim)
