"""The published RotorQuant's detour through full multivectors, kept to reproduce its tables."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import as_float32, pad_to
from rqjax.core import pytree, static
from rqjax.rotations.rotor import rotation_matrices


@pytree
class MultivectorRotor:
    """Embeds groups of three coordinates as multivectors of Cl(3,0) and applies the rotor sandwich (section 3.1).

    d coordinates, padded with zeros to 3 g, become 8 g, ordered by grade: g scalars, 3 g vector components, 3 g
    bivector components, g trivectors. A rotor keeps grades, so all but the vector components are zero; they are
    quantized and stored all the same, as published.
    """

    bivectors: Float[Array, "g 3"]
    dim: int = static(kw_only=True)

    blocked = False

    @property
    def wide_dim(self) -> int:
        """Dimension of the output."""
        return 8 * self.bivectors.shape[-2]

    @property
    def cost(self) -> int:
        return 9 * self.bivectors.shape[-2]

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n e"]:
        groups = self.bivectors.shape[-2]
        vectors = self._rotate(pad_to(as_float32(x), 3 * groups), self.bivectors)
        zeros = jnp.zeros((*x.shape[:-1], groups), vectors.dtype)
        return jnp.concatenate([zeros, vectors, zeros, zeros, zeros, zeros], axis=-1)

    def inverse(self, y: Shaped[Array, "*n e"]) -> Float[Array, "*n d"]:
        groups = self.bivectors.shape[-2]
        return self._rotate(as_float32(y)[..., groups : 4 * groups], -self.bivectors)[..., : self.dim]

    def _rotate(self, x, bivectors) -> Array:
        groups = x.reshape(*x.shape[:-1], bivectors.shape[-2], 3)
        rotated = jnp.einsum("ijg,...gj->...gi", rotation_matrices(bivectors), groups, precision="highest")
        return rotated.reshape(x.shape)
