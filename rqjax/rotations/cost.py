"""What a rotation costs, and how far its arithmetic is from orthogonal."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rqjax.rotations.butterfly import StridedRotor
from rqjax.rotations.chain import Chain, Permutation
from rqjax.rotations.dense import Dense
from rqjax.rotations.givens import Givens
from rqjax.rotations.hadamard import Hadamard
from rqjax.rotations.identity import Identity
from rqjax.rotations.protocol import Rotation
from rqjax.rotations.quaternion import Quaternion
from rqjax.rotations.rotor import Rotor


def multiply_adds(rotation: Rotation) -> int:
    """Multiply-adds to rotate one vector: k^2 for a block of k coordinates, an addition counted as one.

    `Hadamard` is counted as the fast transform, d log2 of its power of two plus d times its odd factor if that is not
    1. A GPU kernel does that many; on a CPU lanes go through a small matrix product, which does more and is faster.
    """
    match rotation:
        case Identity() | Permutation():
            return 0
        case Dense():
            return rotation.dim**2
        case Hadamard():
            power = rotation.dim & -rotation.dim
            odd = rotation.dim // power
            return rotation.dim * (power.bit_length() - 1 + (odd if odd > 1 else 0))
        case Rotor() | StridedRotor():
            return 9 * rotation.bivectors.shape[-2] + 4 * rotation.tail.shape[-1]
        case Givens():
            return 4 * rotation.angles.shape[-1]
        case Quaternion():
            return 16 * rotation.left.shape[-2] + multiply_adds(rotation.tail)
        case Chain():
            return sum(map(multiply_adds, rotation.rotations))
    raise TypeError(f"expected a rotation of rqjax.rotations, got {type(rotation).__name__}")


def orthogonality_error(rotation: Rotation) -> Float[Array, ""]:
    """The Frobenius norm of R^T R - I, where the columns of R are what becomes of the axes in float32."""
    rows = rotation(jnp.eye(rotation.dim))
    return jnp.linalg.norm(jnp.matmul(rows, rows.T, precision=lax.Precision.HIGHEST) - jnp.eye(rotation.dim))
