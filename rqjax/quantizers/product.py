"""Product quantization: groups of coordinates, each as the index of a centroid of its own codebook."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from rqjax.arrays import packing
from rqjax.arrays.kmeans import kmeans, nearest
from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Key, Quantizer, Vectors, check_vectors, pytree, static
from rqjax.core.mesh import varying
from rqjax.quantizers.uniform import Uniform


@pytree
class Rounded:
    """An array stored as codes, on a grid of each first index's own: a codebook rounded (QET's CQO)."""

    quantizer: Uniform
    codes: Codes
    shape: tuple[int, ...] = static(kw_only=True)

    @property
    def values(self) -> Float[Array, "..."]:
        return self.quantizer.decode(self.codes).reshape(*self.codes.shape[:-2], *self.shape)

    @classmethod
    def of(cls, x: Float[Array, "groups k w"], bits: int) -> "Rounded":
        rows = x.reshape(len(x), -1)
        quantizer = Uniform.of(rows, bits, axis=1)
        return cls(quantizer, quantizer.encode(rows), shape=x.shape)


@pytree
class Product(Quantizer):
    """The nearest centroid of each group of consecutive coordinates. Codes: packed indices, uint8 (*n, bytes).

    An index of k centroids takes ceil(log2 k) bits. `scores` looks products up: those of a query's groups with all
    centroids are computed once. Source: Jégou, Douze & Schmid, 2011.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Product(jax.random.normal(jax.random.key(0), (8, 16, 4))).bits_per_vector  # 8 groups of 4, 16 centroids
      32
    """

    codebooks: Float[Array, "groups k w"] | Rounded

    @property
    def centroids(self) -> Float[Array, "groups k w"]:
        return as_float32(self.codebooks.values if isinstance(self.codebooks, Rounded) else self.codebooks)

    @property
    def dim(self) -> int:
        return self._groups * self.codebooks.shape[-1]

    @property
    def index_bits(self) -> int:
        return (self.codebooks.shape[-2] - 1).bit_length()

    def encode(self, x: Vectors) -> UInt8[Array, "*n bytes"]:
        x = as_float32(check_vectors(x, self.dim))
        groups = x.reshape(-1, self._groups, self.dim // self._groups).swapaxes(0, 1)
        indices = lax.map(lambda pair: nearest(*pair), (groups, self.centroids))
        return packing.pack_bytes(indices.T.reshape(*x.shape[:-1], self._groups), self.index_bits)

    def indices(self, codes: UInt8[Array, "*n bytes"]) -> Int[Array, "*n groups"]:
        """Index of the centroid of each group."""
        return packing.unpack_bytes(codes, self.index_bits, self._groups).astype(jnp.int32)

    def decode(self, codes: UInt8[Array, "*n bytes"]) -> Float[Array, "*n d"]:
        decoded = self.centroids[jnp.arange(self._groups), self.indices(codes)]
        return decoded.reshape(*codes.shape[:-1], self.dim)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return jax.vmap(jax.vmap(self.tables))(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return jax.vmap(jax.vmap(self.looked_up))(prepared, codes)

    def tables(self, y: Float[Array, "m d"]) -> Float[Array, "groups m k"]:
        """Products of the groups of queries with all centroids."""
        parts = as_float32(y).reshape(-1, self._groups, self.dim // self._groups)
        return jnp.einsum("mgw,gkw->gmk", parts, self.centroids, precision=lax.Precision.HIGHEST)

    def looked_up(self, tables: Float[Array, "groups m k"], codes: UInt8[Array, "n bytes"]) -> Float[Array, "m n"]:
        """Inner products of the queries that tables are of and the vectors behind codes."""

        def add(total: Array, group: tuple[Array, Array]) -> tuple[Array, None]:
            table, index = group
            return total + table[:, index], None

        none = varying(jnp.zeros((tables.shape[1], len(codes))), tables, codes)
        return lax.scan(add, none, (tables, self.indices(codes).T))[0]

    @property
    def _groups(self) -> int:
        return self.codebooks.shape[-3]

    @classmethod
    def fit(cls, key: Key, x: Float[Array, "n d"], width: int, k: int, *, iterations: int = 20) -> "Product":
        """Centroids by k-means of each group (PQ).

        Args:
          key: random key of the start of k-means.
          x: vectors.
          width: coordinates in a group, a divisor of d.
          k: centroids of a group, at most n.
          iterations: number of Lloyd's iterations.

        Raises:
          ValueError: `width` does not divide d, or k is not from 1 to n.
        """
        return cls(kmeans(key, grouped(x, width), k, iterations))


def grouped(x: Float[Array, "n d"], width: int) -> Float[Array, "groups n w"]:
    """The groups of consecutive coordinates.

    Raises:
      ValueError: `width` does not divide d.
    """
    if width < 1 or x.shape[1] % width:
        raise ValueError(f"expected a width of groups that divides the dimension {x.shape[1]}, got {width}")
    return as_float32(x).reshape(len(x), -1, width).swapaxes(0, 1)
