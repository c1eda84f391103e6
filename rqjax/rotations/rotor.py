"""Rotors in blocks of three coordinates: RotorQuant's rotation (section 3.1)."""

import functools
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import assembled, multiply_blocks, widened_slices
from rqjax.core import Key, platforms, pytree, random, static


@pytree
class Rotor:
    """x_g -> R_g x_g R_g~ for each group g of three coordinates, R_g = exp(B_g / 2) a rotor of Cl(3,0).

    The bivector B = b12 e12 + b13 e13 + b23 e23 is the parameter: any value is an exact rotation, by the angle |B| in
    the plane of B. In matrix form R x R~ = exp(K) x with K = [[0, b12, b13], [-b12, 0, b23], [-b13, -b23, 0]].
    If two coordinates are left over, a planar rotor acts on them; one is left as it is.

    With L = d // 8 lanes, the low groups are {j, L + j, 2L + j} for j < L. The high ones are counted from the end:
    {d - 3L + j, d - 2L + j, d - L + j}. Those of the band between are consecutive triples. So a rotation is nine
    multiply-adds on whole slices, five in the band, and needs no copy. `groups` lists them.
    """

    bivectors: Float[Array, "g 3"]
    """(b12, b13, b23) of the d // 3 rotors: L from the low planes, L from the high planes, then the band."""
    tail: Float[Array, "t"]
    """b12 of the planar rotor: one number if d % 3 == 2, else none."""
    dim: int = static(kw_only=True)

    blocked = False

    @property
    def cost(self) -> int:
        return 9 * self.bivectors.shape[-2] + 4 * self.tail.shape[-1]

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return self._apply(x, rotation_matrices(self.bivectors), planar_matrices(self.tail))

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        if platforms.on_gpu():  # or a fusion would unpack a level for each of the three coordinates that read it
            y = lax.optimization_barrier(y)
        return assembled(self.inverted(y))

    def _apply(self, x: Array, matrices: Float[Array, "3 3 g"], planar: Float[Array, "2 2 t"]) -> Array:
        dim, lanes = self.dim, self.dim // 8
        part, start, stop = widened_slices(x), 3 * lanes, dim - 3 * lanes

        def rotate_planes(matrices, first):
            return multiply_blocks(matrices, [part(first + k * lanes, first + (k + 1) * lanes) for k in range(3)])

        low = rotate_planes(matrices[..., :lanes], 0)
        high = rotate_planes(matrices[..., lanes : 2 * lanes], stop)
        coefficients = _band(matrices[..., 2 * lanes :], planar, stop - start)
        if not lanes:  # fewer than 8 coordinates: no planes around the band to shift into
            part = widened_slices(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(2, 2)]))
            start, stop = 2, dim + 2

        def rotate_band(first, last):
            shifted = [part(start + first + t, start + last + t) for t in range(-2, 3)]
            return functools.reduce(
                operator.add, [c[first:last] * s for c, s in zip(coefficients, shifted, strict=True)]
            )

        middle = (stop - start) // 2
        band = [rotate_band(0, middle), rotate_band(middle, stop - start)]
        return jnp.concatenate([*low, *band, *high], axis=-1)

    @property
    def inverted(self) -> "Rotor":
        """The rotor whose rotation is the inverse."""
        return Rotor(-self.bivectors, -self.tail, dim=self.dim)

    @property
    def groups(self) -> np.ndarray:
        """Coordinates (g, 3) of each rotor, in the order of `bivectors`; the planar rotor has the two that are left."""
        lanes, lane = self.dim // 8, np.arange(self.dim // 8)[:, None]
        low = lane + lanes * np.arange(3)
        band = 3 * lanes + np.arange((self.dim - 6 * lanes) // 3 * 3).reshape(-1, 3)
        return np.concatenate([low, self.dim - 3 * lanes + low, band])

    @classmethod
    @platforms.made_on_host
    def random(cls, key: Key, dim: int) -> "Rotor":
        """Rotors uniform (Haar) on SO(3), the planar one on SO(2)."""
        rotor_key, tail_key = random.split(key)
        tail = random.uniform(tail_key, (int(dim % 3 == 2),), minval=-jnp.pi, maxval=jnp.pi)
        return cls(random_bivectors(rotor_key, dim // 3), tail, dim=dim)


def random_bivectors(key: Key, count: int) -> Float[Array, "g 3"]:
    """Bivectors of rotors uniform (Haar) on SO(3): four Gaussians, normalized, are a uniform rotor."""
    scalar, bivector = jnp.split(random.normal(key, (count, 4)), [1], axis=-1)
    size = jnp.linalg.norm(bivector, axis=-1, keepdims=True)
    return 2 * jnp.arctan2(size, scalar) * bivector / size


def rotation_matrices(bivectors: Float[Array, "g 3"]) -> Float[Array, "3 3 g"]:
    """exp(K) of each bivector: I + sin(a)/a K + (1 - cos(a))/a^2 K^2 with a = |B| (Rodrigues), smooth at a = 0.

    The rotors are the last axis, so that slices of lanes are multiplied by contiguous coefficients.
    """
    b12, b13, b23 = b = bivectors.T
    zero = jnp.zeros_like(b12)
    k = jnp.stack([zero, b12, b13, -b12, zero, b23, -b13, -b23, zero]).reshape(3, 3, -1)
    square = jnp.sum(b**2, axis=0)
    angle = jnp.sqrt(jnp.where(square > 0, square, 1)) * (square > 0)
    half = jnp.sinc(angle / (2 * jnp.pi))
    k2 = sum(k[:, i, None] * k[None, i, :] for i in range(3))
    return jnp.eye(3)[..., None] + jnp.sinc(angle / jnp.pi) * k + half**2 / 2 * k2


def planar_matrices(tail: Float[Array, "t"]) -> Float[Array, "2 2 t"]:
    c, s = jnp.cos(tail), jnp.sin(tail)
    return jnp.stack([c, s, -s, c]).reshape(2, 2, -1)


def _band(matrices: Float[Array, "3 3 g"], planar: Float[Array, "2 2 t"], width: int) -> Float[Array, "5 w"]:
    """Row t multiplies x[p + t - 2] in the output p of block-diagonal rotations of consecutive coordinates."""

    def diagonals(blocks):
        size = len(blocks)
        rows = [jnp.pad(blocks[r], ((2 - r, 3 + r - size), (0, 0))) for r in range(size)]
        return jnp.stack(rows, axis=-1).reshape(5, -1)

    fixed = jnp.zeros((5, width % 3 == 1)).at[2].set(1)
    return jnp.concatenate([diagonals(matrices), diagonals(planar), fixed], axis=1)
