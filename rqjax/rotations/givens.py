"""Plane rotations in blocks of two coordinates (PlanarQuant)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import assembled, multiply_blocks, widened_slices
from rqjax.core import Key, platforms, pytree, random, static


@pytree
class Givens:
    """Rotates the coordinates j and d // 2 + j by the j-th angle; an odd last coordinate stays as it is."""

    angles: Float[Array, "g"]
    dim: int = static(kw_only=True)

    blocked = False

    @property
    def cost(self) -> int:
        return 4 * self.angles.shape[-1]

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return self._apply(x, self.angles)

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return assembled(self._apply(y, -self.angles))

    def _apply(self, x, angles) -> Array:
        size, part = self.dim // 2, widened_slices(x)
        plane = jnp.array([[0, 1], [-1, 0]])[..., None]
        matrices = jnp.cos(angles) * jnp.eye(2)[..., None] + jnp.sin(angles) * plane
        blocks = multiply_blocks(matrices, [part(0, size), part(size, 2 * size)])
        return jnp.concatenate([*blocks, part(2 * size, self.dim)], axis=-1)

    @classmethod
    @platforms.made_on_host
    def random(cls, key: Key, dim: int) -> "Givens":
        """Uniform angles."""
        return cls(random.uniform(key, (dim // 2,), minval=-jnp.pi, maxval=jnp.pi), dim=dim)
