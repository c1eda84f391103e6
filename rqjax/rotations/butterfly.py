"""Rotors on coordinates a stride apart: layers of a butterfly in base 3, which together mix every coordinate with every
other."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import as_float32, assembled
from rqjax.core import Key, platforms, pytree, random, static
from rqjax.rotations.chain import Chain
from rqjax.rotations.rotor import planar_matrices, random_bivectors, rotation_matrices


@pytree
class StridedRotor:
    """x_g -> R_g x_g R_g~ for the groups {i, i + s, i + 2 s} of coordinates whose base-3 digit of the stride s is 0.

    Parameters are bivectors as in `Rotor`. Where the last coordinate cuts a group short, a planar rotor acts on the two
    that are left; one stays as it is. Layers with strides 1, 3, 9, ... are to three coordinates what the butterflies of
    a fast Fourier transform are to two.
    """

    bivectors: Float[Array, "g 3"]
    tail: Float[Array, "t"]
    """b12 of the planar rotors."""
    dim: int = static(kw_only=True)
    stride: int = static(kw_only=True)

    blocked = False

    @property
    def cost(self) -> int:
        return 9 * self.bivectors.shape[-2] + 4 * self.tail.shape[-1]

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return self._apply(x, rotation_matrices(self.bivectors), planar_matrices(self.tail))

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return assembled(self._apply(y, rotation_matrices(-self.bivectors), planar_matrices(-self.tail)))

    def _apply(self, x: Array, matrices: Float[Array, "3 3 g"], planar: Float[Array, "2 2 t"]) -> Array:
        """Sums shifted vectors, each times the coefficients of its coordinates."""
        wide = jnp.pad(as_float32(x), [(0, 0)] * (x.ndim - 1) + [(2 * self.stride,) * 2])
        parts = [
            row * wide[..., 2 * self.stride + shift : 2 * self.stride + shift + self.dim]
            for shift, row in self._diagonals(matrices, planar)
        ]
        return functools.reduce(operator.add, parts)

    def times(self, matrix: Float[Array, "d m"]) -> Float[Array, "d m"]:
        """Multiplies R with a matrix, group by group: five times as fast as a product of matrices where it has a
        gradient."""
        order, triples, pairs = _order(self.stride, self.dim)
        rows: Any = _reordered(matrix, order)
        parts = jnp.split(rows, [3 * triples, 3 * triples + 2 * pairs])
        turns = (rotation_matrices(self.bivectors), planar_matrices(self.tail))
        for i, turn in enumerate(turns):
            if parts[i].size:
                groups = parts[i].reshape(-1, len(turn), matrix.shape[1])
                turned = jnp.einsum("ijg,gjm->gim", turn, groups, precision=lax.Precision.HIGHEST)
                parts[i] = turned.reshape(parts[i].shape)
        return _reordered(jnp.concatenate(parts), tuple(np.argsort(order).tolist()))

    def _diagonals(self, matrices: Array, planar: Array) -> list[tuple[int, Float[Array, "d"]]]:
        """Shifts, and the coefficients of x[p + shift] in the output p."""
        numbers = jnp.concatenate([jnp.array([0.0, 1.0]), matrices.ravel(), planar.ravel()])
        places = _places(self.stride, self.dim)
        return [((k - 2) * self.stride, numbers[row]) for k, row in enumerate(places) if row.any()]

    @property
    def groups(self) -> np.ndarray:
        """Coordinates (g, 3) of each rotor."""
        return _groups(self.stride, self.dim)[0]

    @classmethod
    def identity(cls, dim: int, *, stride: int) -> "StridedRotor":
        """The layer that leaves every vector as it is: where training may begin."""
        triples, pairs = _groups(stride, dim)
        return cls(jnp.zeros((len(triples), 3)), jnp.zeros(len(pairs)), dim=dim, stride=stride)

    @classmethod
    @platforms.made_on_host
    def random(cls, key: Key, dim: int, *, stride: int) -> "StridedRotor":
        """Rotors uniform (Haar) on SO(3), the planar ones on SO(2)."""
        triples, pairs = _groups(stride, dim)
        rotor_key, tail_key = random.split(key)
        tail = random.uniform(tail_key, (len(pairs),), minval=-jnp.pi, maxval=jnp.pi)
        return cls(random_bivectors(rotor_key, len(triples)), tail, dim=dim, stride=stride)


def butterfly(key: Array | None, dim: int) -> Chain:
    """The ceil(log3 d) layers of strides 1, 3, 9, ..., random, or without a key the identity."""
    strides = [1]
    while 3 * strides[-1] < dim:
        strides.append(3 * strides[-1])
    if key is None:
        return Chain(tuple(StridedRotor.identity(dim, stride=stride) for stride in strides))
    keys = random.split(key, len(strides))
    return Chain(tuple(StridedRotor.random(k, dim, stride=stride) for k, stride in zip(keys, strides, strict=True)))


@functools.cache
def _groups(stride: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of whole groups (g, 3), and of groups of two (t, 2)."""
    first = np.flatnonzero(np.arange(dim) // stride % 3 == 0)
    group = first[:, None] + stride * np.arange(3)
    size = (group < dim).sum(axis=1)
    return group[size == 3], group[size == 2, :2]


@functools.cache
def _order(stride: int, dim: int) -> tuple[tuple[int, ...], int, int]:
    """Coordinates, those of whole groups first, then of groups of two and the others; how many groups there are."""
    triples, pairs = _groups(stride, dim)
    used = np.concatenate([triples.ravel(), pairs.ravel()])
    return (*used.tolist(), *np.setdiff1d(np.arange(dim), used).tolist()), len(triples), len(pairs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _reordered(matrix: Float[Array, "d m"], order: tuple[int, ...]) -> Float[Array, "d m"]:
    """Rows in another order. Its gradient is one too; that of indexing would be a scatter, ten times as slow."""
    return matrix[np.array(order)]


_reordered.defvjp(
    lambda matrix, order: (_reordered(matrix, order), None),
    lambda order, _, gradient: (gradient[np.argsort(order)],),
)


@functools.cache
def _places(stride: int, dim: int) -> np.ndarray:
    """Places (5, dim) in the numbers (0, 1, matrices, planar): row k has those of the coefficients of x[p + (k - 2)
    stride]."""
    places, at = np.zeros((5, dim), int), 2
    places[2] = 1
    for groups in _groups(stride, dim):
        count, size = groups.shape
        for row in range(size):
            for column in range(size):
                places[2 + column - row, groups[:, row]] = at + np.arange(count)
                at += count
    return places
