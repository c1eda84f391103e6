"""The randomized Hadamard transform of any size."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.core import Key, platforms, pytree, random


@pytree
class Hadamard:
    """x -> H (s * x), with random signs s and the orthogonal H = H_2 x ... x H_2 x F of size d = 2^k m, m odd.

    H_2 is [[1, 1], [1, -1]] / sqrt(2). F is the Hartley matrix cos(2 pi i j / m) + sin(2 pi i j / m) over sqrt(m),
    which is symmetric, orthogonal and without zeros for odd m. So H mixes every coordinate with every other, whatever
    the size, and H is its own inverse.
    """

    signs: Int8[Array, "d"]
    """Random signs, in whole numbers, so that no training takes them for parameters."""

    blocked = True

    @property
    def dim(self) -> int:
        return self.signs.shape[-1]

    @property
    def cost(self) -> int:
        """Multiply-adds of the fast transform: d log2 of its power of two, plus d times its odd factor if that is not
        1. A GPU kernel does that many; on a CPU lanes go through a small matrix product, which does more and is
        faster."""
        power = self.dim & -self.dim
        odd = self.dim // power
        return self.dim * (power.bit_length() - 1 + (odd if odd > 1 else 0))

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return transform(as_float32(x) * self.signs)

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return transform(as_float32(y)) * self.signs

    @classmethod
    @platforms.made_on_host
    def random(cls, key: Key, dim: int) -> "Hadamard":
        return cls(random.rademacher(key, (dim,), jnp.int8))


def transform(x: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
    """Computes H x along the last axis: a matrix product inside each of up to 8 planes, then butterflies between the
    planes."""
    dim = x.shape[-1]
    count = next((c for c in (8, 4, 2) if dim % c == 0 and dim // c >= 32), 1)  # smaller products run no faster
    lanes = dim // count
    matrix = jnp.asarray(_matrix(lanes) / np.sqrt(count), x.dtype)
    rows = jnp.matmul(x.reshape(-1, lanes), matrix, precision=lax.Precision.HIGHEST).reshape(x.shape)
    parts = [rows[..., k * lanes : (k + 1) * lanes] for k in range(count)]
    for stride in (1, 2, 4)[: count.bit_length() - 1]:
        pairs = [(k, k + stride) for k in range(count) if not k & stride]
        for a, b in pairs:
            parts[a], parts[b] = parts[a] + parts[b], parts[a] - parts[b]
    return jnp.concatenate(parts, axis=-1)


@functools.cache
def _matrix(dim: int) -> np.ndarray:
    """H of size `dim` (symmetric)."""
    odd = dim // (dim & -dim)
    angle = 2 * np.pi * np.outer(np.arange(odd), np.arange(odd)) / odd
    matrix = (np.cos(angle) + np.sin(angle)) / np.sqrt(odd)
    while len(matrix) < dim:
        matrix = np.kron(np.array([[1, 1], [1, -1]]) / np.sqrt(2), matrix)
    return matrix
