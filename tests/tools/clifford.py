"""The geometric algebra Cl(3,0) from its definition: the slow oracle that the fast rotors are tested against.

A multivector is an array (..., 8) whose component i belongs to the basis blade with the bitmap i. Bit k says whether
e_{k+1} is a factor, so the order is 1, e1, e2, e12, e3, e13, e23, e123. All signs follow from e_i e_i = 1 and
e_i e_j = -e_j e_i; none is typed in.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Multivector = Float[Array, "*#n 8"]

GRADES = np.array([i.bit_count() for i in range(8)])
VECTOR = [1, 2, 4]
"""Components e1, e2, e3."""
BIVECTOR = [3, 5, 6]
"""Components e12, e13, e23."""


def _sign(a: int, b: int) -> int:
    """The sign of the product of two blades: one swap for each factor of `a` that stands behind one of `b`."""
    swaps = sum(((a >> k) & b).bit_count() for k in range(1, 3))
    return (-1) ** swaps


_TABLE = np.zeros((8, 8, 8), np.float32)
for _a in range(8):
    for _b in range(8):
        _TABLE[_a, _b, _a ^ _b] = _sign(_a, _b)


def product(a: Multivector, b: Multivector) -> Multivector:
    """The geometric product a b."""
    return jnp.einsum("...i,...j,ijk->...k", a, b, _TABLE, precision="highest")


def reverse(a: Multivector) -> Multivector:
    """a~: the factors of every blade in reverse order."""
    return a * (-1.0) ** (GRADES * (GRADES - 1) // 2)


def grade(a: Multivector, k: int) -> Multivector:
    """The part of grade k."""
    return jnp.where(k == GRADES, a, 0)


def sandwich(rotor: Multivector, a: Multivector) -> Multivector:
    """R a R~."""
    return product(product(rotor, a), reverse(rotor))


def embed(x: Float[Array, "*n 3"], components: list[int]) -> Multivector:
    """Three numbers as the `VECTOR` or the `BIVECTOR` components of a multivector."""
    return jnp.zeros((*x.shape[:-1], 8), x.dtype).at[..., np.array(components)].set(x)


def exp(bivector: Float[Array, "*n 3"]) -> Multivector:
    """The rotor exp(B/2) = cos(|B|/2) + sin(|B|/2) B/|B| of B = (b12, b13, b23) (RotorQuant, equation 2)."""
    angle = jnp.linalg.norm(bivector, axis=-1, keepdims=True)
    rotor = embed(jnp.sinc(angle / (2 * jnp.pi)) * bivector / 2, BIVECTOR)
    return rotor.at[..., :1].set(jnp.cos(angle / 2))


def log(rotor: Multivector) -> Float[Array, "*n 3"]:
    """The bivector B with exp(B/2) = rotor and |B| <= 2 pi; the inverse of `exp`."""
    bivector = rotor[..., np.array(BIVECTOR)]
    size = jnp.linalg.norm(bivector, axis=-1, keepdims=True)
    half = jnp.arctan2(size, rotor[..., :1])
    return 2 * bivector * jnp.where(size > 0, half / jnp.where(size > 0, size, 1), 1)
