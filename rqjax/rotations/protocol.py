"""The protocol of rotations."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped


@runtime_checkable
class Rotation(Protocol):
    """A linear isometry. Input in any floating-point dtype, output in float32 (float64 for float64)."""

    @property
    def dim(self) -> int:
        """The dimension of the vectors."""
        ...

    @property
    def cost(self) -> int:
        """Multiply-adds to rotate one vector: k^2 for a block of k coordinates, an addition counted as one."""
        ...

    @property
    def blocked(self) -> bool:
        """True if a CPU takes long to rotate many vectors at once, whose temporaries leave its cache. Quantizers then
        rotate and encode a block of them at a time."""
        ...

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n e"]:
        """R x; e = d unless the isometry embeds, and then it has an attribute `wide_dim`."""
        ...

    def inverse(self, y: Shaped[Array, "*n e"]) -> Float[Array, "*n d"]:
        """R^T y, which is R^-1 y for every y that R reaches."""
        ...


def orthogonality_error(rotation: Rotation) -> Float[Array, ""]:
    """Frobenius norm of R^T R - I, where the columns of R are the rotated axes in float32."""
    rows = rotation(jnp.eye(rotation.dim))
    return jnp.linalg.norm(jnp.matmul(rows, rows.T, precision=lax.Precision.HIGHEST) - jnp.eye(rotation.dim))
