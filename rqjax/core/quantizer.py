"""The base class of all quantizers, and operations on any of them.

Laws, tested for every entry of `METHODS`: `dot(y, c) == y @ decode(c).T`; `nbytes(encode(x)) * 8` is
`bits_per_vector` times the number of vectors; `encode` is the same under `jit`, `vmap` and in a loop.

Shapes: queries y (batch, heads, rows, d), weights w (batch, heads, rows, tokens), codes of (batch, heads, tokens).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from rqjax.core.checks import check_vectors
from rqjax.core.dispatch import Operation, operation
from rqjax.core.mesh import varying
from rqjax.core.products import all_in_floats, full_precision_einsum, over, weighted_sums
from rqjax.core.registry import nest
from rqjax.core.token_array import TokenArray

Codes: TypeAlias = Any
"""Codes that `encode` returns: a pytree of arrays, each with the leading axes of the vectors."""

Vectors: TypeAlias = Shaped[Array | np.ndarray, "*n d"]
"""Vectors along the last axis in float32, bfloat16, float16 or (under x64) float64; leading axes are free."""

Queries: TypeAlias = Shaped[Array | np.ndarray, "*m d"]
"""Queries are as `Vectors`, with leading axes of their own."""


BLOCK = 2**20
"""Coordinates that `Quantizer.dot` unpacks at once."""


class Quantizer:
    """A pytree that turns vectors into codes and back. Big quantizers are small ones nested.

    A new one is a `pytree` that inherits this class and has `dim`, `encode` and `decode`; the size of codes follows
    from `encode`, products from `decode`. Products that decode nothing are the methods `prepare` and `scores`, sums
    `weigh` and `restore`: `scores(prepare(y), c) == y @ decode(c).T` and `restore(weigh(w, c)) == w @ decode(c)`.
    """

    dim: int
    """The dimension d of the vectors."""
    tile = 1
    """Vectors that share numbers: `encode` takes a multiple of so many along the axis before the last. Arrays of codes
    have one entry for each tile of vectors."""
    heads: int | None = None
    """Number of heads, if it is known; vectors are then (..., heads, tokens, d)."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Makes a method that overrides an operation another body of it."""
        super().__init_subclass__(**options)
        for name, body in list(vars(cls).items()):
            overridden = getattr(super(cls, cls), name, None)
            if isinstance(overridden, Operation):
                setattr(cls, name, operation(body, of=overridden))

    @functools.partial(operation, vectors=True)
    def encode(self, x: Vectors) -> Codes:
        """Encodes the vectors `x` (*n, d).

        Raises:
          TypeError: `x` does not hold floating-point numbers.
          ValueError: the last axis of `x` is not `dim` long.
        """
        raise NotImplementedError(f"expected an encode in {type(self).__name__}, got none")

    @operation
    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        """Decodes `codes` to vectors in float32 (or the wider dtype of the quantizer's own arrays)."""
        raise NotImplementedError(f"expected a decode in {type(self).__name__}, got none")

    def encode_direction(self, x: Shaped[Array, "*n d"], norm: Float[Array, "*n 1"]) -> Codes:
        """Encodes vectors over their norms."""
        return self.encode(over(x, norm))

    def in_own_axes(self, function: Callable[..., Any], x: Shaped[Array, "*n d"], norm: Float[Array, "*n 1"]) -> Any:
        """Calls `function(quantizer, x, norm)`. A rotation passes its inner quantizer and the rotated x: norms, and
        products with decoded vectors, are the same there."""
        return function(self, x, norm)

    @operation
    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        """Prepares queries for `scores`."""
        return y

    @operation
    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        """Inner products of prepared queries with the vectors behind codes (b, h, t), as they are or `laid_out`."""
        return full_precision_einsum("bhrd,bhtd->bhrt", prepared, self.decode(codes))

    @operation
    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        """Sums of the vectors behind codes with weights w, not yet `restore`d; such sums may be added. A vector whose
        weight is 0 adds nothing, not even NaN."""
        return weighted_sums(w, self.decode(codes))

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        """Converts sums of `weigh` to vectors."""
        return sums

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        """Codes (b, h, t) as a cache stores them, keys or, `transposed`, values: each array as a `TokenArray`."""
        return jax.tree.map(lambda leaf: TokenArray.of(leaf, axis=2, tokens_per_entry=self.tile), codes)

    @property
    def in_integers(self) -> bool:
        """True if products are taken with levels in int8 and nothing is decoded."""
        return False

    @property
    def width(self) -> int:
        """Bytes that a coordinate takes while it is multiplied; blocks of codes are sized by it."""
        return 4

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        """Round trip with derivatives: `leaf(x, levels)` takes the place of the nearest levels.

        Raises:
          TypeError: the quantizer is not a nest of norms, gains, means and rotations around levels.
        """
        raise TypeError(
            "expected norms, gains, means and rotations around a Scalar or PerCoordinate for a loss without hard "
            f"codes, got {nest(self)}"
        )

    @functools.partial(operation, vectors=True)
    def dot(self, y: Queries, codes: Codes) -> Float[Array, "*mn"]:
        """Inner products (*m, *n) of queries `y` (*m, d) and the vectors behind `codes`: `y @ decode(codes).T`."""
        y = check_vectors(y, self.dim)
        lead = jax.eval_shape(self.decode, codes).shape[:-1]
        batch, heads, tokens = (math.prod(lead[:-2]), *lead[-2:]) if self.heads else (1, 1, math.prod(lead))

        def by_heads(a: Array) -> Array:
            own = a.shape[len(lead) - 2] if self.heads else 1  # fewer than heads where these share codes
            count = math.prod(a.shape[: len(lead)]) // max(batch * own, 1)
            return a.reshape(batch, own, count, *a.shape[len(lead) :])

        rows = y.reshape(1, 1, math.prod(y.shape[:-1]), self.dim).astype(jnp.promote_types(y.dtype, jnp.float32))
        size = max(BLOCK // max(batch * heads * self.dim, 1), 1)
        with all_in_floats():
            prepared = self.prepare(jnp.broadcast_to(rows, (batch, heads, *rows.shape[2:])))
            found = self._scores_of(prepared, jax.tree.map(by_heads, codes), tokens, size)
        return jnp.moveaxis(found, 2, 0).reshape(*y.shape[:-1], *lead)

    def _scores_of(self, prepared: Any, codes: Codes, tokens: int, size: int) -> Float[Array, "b h r t"]:
        """Scores of so many tokens, of which `size` are unpacked at a time."""
        if self.tile > 1 or tokens < 2 * size:
            return self.scores(prepared, codes)

        def block(start: Any) -> Array:
            read = lambda a: lax.dynamic_slice_in_dim(a, start, size, 2)  # noqa: E731
            return self.scores(prepared, jax.tree.map(read, codes))

        def add(i: Any, found: Array) -> Array:
            start = jnp.minimum(i * size, tokens - size)  # the last block may reach back into the one before
            return lax.dynamic_update_slice_in_dim(found, block(start), start, 3)

        one = jax.eval_shape(block, 0)
        found = varying(jnp.zeros((*one.shape[:3], tokens), one.dtype), prepared, codes)
        return lax.fori_loop(0, -(-tokens // size), add, found)

    @property
    def bits_per_vector(self) -> float | int:
        """Bits that the codes of one vector take in memory: indices, norms, scales and padding, as they are stored.

        A cache stores as many if each part of a vector has a multiple of 32 coordinates. Otherwise its tokens share
        words, and it pads less or more: `eden` of 80 coordinates takes 272 bits at 3 bits each, in a cache 256.
        """
        heads, count = self.heads or 1, (self.heads or 1) * self.tile
        shape = (heads, self.tile, self.dim) if self.heads or self.tile > 1 else (self.dim,)
        total = 8 * nbytes(jax.eval_shape(lambda q: q.encode(jnp.zeros(shape)), self))
        return total / count if total % count else total // count


class Wrapper(Quantizer):
    """A quantizer whose codes are those of its `inner` and decode to the same vectors, but for what it overrides.

    A combinator that changes vectors overrides `encode` and `decode`, and does to queries and sums what `decode` does.

    Example:
      >>> import jax, rqjax
      >>> @rqjax.pytree
      ... class Halved(rqjax.Wrapper):
      ...     inner: rqjax.Quantizer
      ...     encode = lambda self, x: self.inner.encode(x / 2)
      ...     decode = lambda self, codes: 2 * self.inner.decode(codes)
      ...     prepare = lambda self, y: self.inner.prepare(2 * y)
      ...     restore = lambda self, sums: 2 * self.inner.restore(sums)
      >>> Halved(rqjax.eden(jax.random.key(0), dim=64, bits=3)).bits_per_vector
      208
    """

    inner: Quantizer

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def tile(self) -> int:
        return self.inner.tile

    @property
    def heads(self) -> int | None:
        return self.inner.heads

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return self.inner.prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return self.inner.scores(prepared, codes)

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return self.inner.weigh(w, codes)

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return self.inner.restore(sums)

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        return self.inner.laid_out(codes, transposed)

    @property
    def in_integers(self) -> bool:
        return self.inner.in_integers

    @property
    def width(self) -> int:
        return self.inner.width


@functools.partial(operation, of=Quantizer.encode)
def encode(quantizer: Quantizer, x: Vectors) -> Codes:
    """`quantizer.encode(x)`, by a fused kernel where there is one.

    Args:
      quantizer: any quantizer.
      x: vectors (*n, d).
      implementation: the name of a backend for its kernel, "xla" for none, None for the kernel wherever there is one
        for the quantizer, device, shape and dtype.

    Raises:
      Unsupported: the kernel cannot be used; the message says why.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.eden(jax.random.key(0), dim=64, bits=3)
      >>> scales, words = rqjax.encode(q, jnp.ones((10, 64)))
      >>> (scales.shape, words.shape)
      ((10,), (10, 6))
    """
    return quantizer.encode(check_vectors(x, quantizer.dim))


@functools.partial(operation, of=Quantizer.decode)
def decode(quantizer: Quantizer, codes: Codes, *, dtype: DTypeLike | None = None) -> Shaped[Array, "*n d"]:
    """`quantizer.decode(codes)`, in a dtype if given, by a fused kernel where there is one; the rest as in `encode`.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.eden(jax.random.key(0), dim=64, bits=3)
      >>> rqjax.decode(q, q.encode(jnp.ones((10, 64))), dtype="bfloat16").dtype
      dtype(bfloat16)
    """
    x = quantizer.decode(codes)
    return x if dtype is None else x.astype(dtype)


@functools.partial(operation, vectors=True)
def roundtrip(quantizer: Quantizer, x: Vectors) -> Shaped[Array, "*n d"]:
    """Vectors decoded from the codes of x, in the dtype of x, by one kernel if there is one; the rest as in `encode`.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.roundtrip(rqjax.eden(jax.random.key(0), dim=64, bits=3), jnp.ones((10, 64))).shape
      (10, 64)
    """
    return decode(quantizer, encode(quantizer, x), dtype=jnp.asarray(x).dtype)


def straight_through(quantizer: Quantizer, x: Vectors) -> Shaped[Array, "*n d"]:
    """`roundtrip` with the gradients of training through rounding. The gradient to x is that of the identity. The
    gradient to the quantizer's arrays is that of decoding with the codes as they are. (The gradient of `roundtrip`
    itself knows of norms alone.)

    Source: Bengio, Léonard & Courville, 2013, arXiv:1308.3432.

    Args:
      quantizer: any quantizer.
      x: vectors (*n, d).

    Returns:
      The vectors decoded from the codes of x, in the dtype of x.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.eden(jax.random.key(0), dim=64, bits=3)
      >>> jax.grad(lambda x: rqjax.straight_through(q, x).sum())(jnp.ones(64)).max()
      Array(1., dtype=float32)
    """
    x = check_vectors(x, quantizer.dim)
    codes = jax.lax.stop_gradient(quantizer.encode(jax.lax.stop_gradient(x)))
    return quantizer.decode(codes).astype(x.dtype) + (x - jax.lax.stop_gradient(x))


def nbytes(tree: PyTree) -> int:
    """Bytes that the arrays of a pytree (codes, a quantizer, both) take in memory.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.nbytes(rqjax.Affine(64, 4, group_size=64).encode(jnp.ones((10, 64))))
      360
    """
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
