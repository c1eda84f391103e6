"""A dense matrix: TurboQuant's rotation (Algorithm 1)."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.core import Key, platforms, pytree, random


@pytree
class Dense:
    """x -> M x for an orthogonal M; d^2 multiply-adds and parameters."""

    matrix: Float[Array, "d d"]

    blocked = True

    @property
    def dim(self) -> int:
        return self.matrix.shape[-1]

    @property
    def cost(self) -> int:
        return self.dim**2

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return jnp.matmul(as_float32(x), self.matrix.T, precision=lax.Precision.HIGHEST)

    def inverse(self, y: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return jnp.matmul(as_float32(y), self.matrix, precision=lax.Precision.HIGHEST)

    @classmethod
    @platforms.made_on_host
    def haar(cls, key: Key, dim: int, *, block: int | None = None) -> "Dense":
        """Uniform on O(d): QR of a Gaussian matrix, signs fixed so that R has a positive diagonal (Mezzadri, 2007).

        If `block` is given, each `block` adjacent coordinates have a rotation of their own, uniform on O(block).
        """
        matrix, place = random.normal(key, (dim, dim)), jnp.arange(dim) // (block or dim)
        return cls(_orthonormal(jnp.where(place[:, None] == place, matrix, 0)))

    @classmethod
    @platforms.made_on_host
    def klt(cls, x: Shaped[Array, "n d"]) -> "Dense":
        """The Karhunen-Loeve transform of vectors: their principal axes about zero, the loudest first."""
        x = as_float32(x)
        return cls.principal(jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST))

    @classmethod
    @platforms.made_on_host
    def principal(cls, moment: Float[Array, "d d"]) -> "Dense":
        """Principal axes of a second moment, as `klt` takes them of vectors."""
        return cls(_axes(moment).T[::-1])

    @classmethod
    @platforms.made_on_host
    def procrustes(cls, x: Shaped[Array, "n d"], y: Shaped[Array, "n d"]) -> "Dense":
        """The orthogonal M with the least sum of |M x - y|^2 (Schoenemann, 1966; OPQ: Ge et al., 2013)."""
        return cls(_polar(jnp.matmul(as_float32(y).T, as_float32(x), precision=lax.Precision.HIGHEST)))


# Batched, two such factorizations in one program can wait for each other's CPU threads for ever: hence one by one.
@jax.custom_batching.sequential_vmap
def _orthonormal(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    if platforms.on_apple():
        return _gram_schmidt(matrix)
    q, r = jnp.linalg.qr(matrix)
    return q * jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0)


def _gram_schmidt(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Orthonormalizes a regular matrix in plain operations: each column minus its part along those before. It does so
    twice, as once leaves too much of it."""

    def column(j: Array, q: Float[Array, "d d"]) -> Float[Array, "d d"]:
        v = lax.dynamic_slice_in_dim(q, j, 1, axis=1)
        for _ in range(2):
            along = jnp.matmul(q.T, v, precision=lax.Precision.HIGHEST)
            along = jnp.where(jnp.arange(len(q))[:, None] < j, along, 0)
            v = v - jnp.matmul(q, along, precision=lax.Precision.HIGHEST)
        return lax.dynamic_update_slice_in_dim(q, v / jnp.sqrt(jnp.sum(v**2)), j, axis=1)

    return lax.fori_loop(0, len(matrix), column, matrix)


def _check_host(what: str) -> None:
    if platforms.on_apple():
        raise ValueError(f"on {platforms.platform()} there are no {what} under jit or vmap: fit outside, on the host")


@jax.custom_batching.sequential_vmap
def _axes(covariance: Float[Array, "d d"]) -> Float[Array, "d d"]:
    _check_host("eigenvectors")
    return jnp.linalg.eigh(covariance)[1]


@jax.custom_batching.sequential_vmap
def _polar(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    _check_host("singular vectors")
    u, _, vt = jnp.linalg.svd(matrix)
    return jnp.matmul(u, vt, precision=lax.Precision.HIGHEST)
