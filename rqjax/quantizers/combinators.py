"""Combinators, which make big quantizers from small ones."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rqjax.arrays import norms
from rqjax.arrays.blocks import in_blocks, inner
from rqjax.arrays.planes import as_float32, materialized
from rqjax.core import Codes, Quantizer, TokenArray, Vectors, Wrapper, check_fits, check_vectors, pytree, static
from rqjax.core.products import over, times
from rqjax.rotations import Rotation

LONGEST = 3**0.5
"""Greatest length of a decoded vector in mode "unbiased", relative to the vector; without it, the length grows as the
cosine between them falls. The squared error is thus at most 4; nothing changes where the cosine is above 0.58."""


class Multiplied(Wrapper):
    """A number times a vector of `inner`. Codes: (numbers (*n,), inner codes)."""

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        number, inner = codes
        return norms.restored(number)[..., None] * self.inner.decode(inner)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        number, inner = codes
        return self.inner.scores(prepared, inner) * norms.restored(number)[:, :, None]

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        number, inner = codes
        return self.inner.weigh(times(w, norms.restored(number)[:, :, None]), inner)

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        number, inner = codes
        return TokenArray.of(number, axis=2), self.inner.laid_out(inner, transposed)


@pytree
class Normalized(Multiplied):
    """Stores the norm and quantizes the direction. Codes: (norms (*n,), inner codes).

    The direction is taken relative to the norm as stored, so that rounding the norm costs nothing.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Normalized(rqjax.lloyd_max(64, 3)).bits_per_vector
      208
    """

    inner: Quantizer
    dtype: str = static(default="bfloat16", kw_only=True)
    """Dtype of the stored norms; bfloat16 has float32's range, uint8 is a logarithmic scale from 2^-16 to 2^16."""

    def __post_init__(self):
        norms.check_dtype(self.dtype)

    def encode(self, x: Vectors) -> Codes:
        x = check_vectors(x, self.dim)
        norm = norms.stored(norms.norm(x), self.dtype)
        codes = lambda inner, x, norm: inner.encode_direction(x, norm)  # noqa: E731
        return norm[..., 0], self.inner.in_own_axes(codes, x, norms.restored(norm))

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        return norms.norm(x) * self.inner.relaxed(norms.direction(x), leaf)


@pytree
class Scaled(Multiplied):
    """`Normalized`, but the one number stored is the norm times the best scale of the decoded direction x~.

    Let u = x / |x|. In mode "mse" the scale is <u, x~> / |x~|^2, which minimizes the squared error. In mode "unbiased"
    it is 1 / <u, x~>: then <x, decode(x)> = |x|^2, and inner products are unbiased under a uniform rotation. Codes:
    (scales (*n,), inner codes). Source: EDEN (Vargaftik et al., ICML 2022), DRIVE (NeurIPS 2021).

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Scaled(rqjax.lloyd_max(64, 3), mode="unbiased")
      Scaled(Scalar(3 bits), mode='unbiased')
    """

    inner: Quantizer
    mode: str = static(default="mse", kw_only=True)
    dtype: str = static(default="bfloat16", kw_only=True)

    def __post_init__(self):
        if self.mode not in ("mse", "unbiased"):
            raise ValueError(f"expected mode 'mse' or 'unbiased', got {self.mode!r}")
        norms.check_dtype(self.dtype)

    def encode(self, x: Vectors) -> Codes:
        x = check_vectors(x, self.dim)
        norm = norms.norm(x)
        measured = functools.partial(self.inner.in_own_axes, _measured)
        inner, product, square = _in_blocks(self.inner, measured, x, norm)
        scale = product / square if self.mode == "mse" else 1 / jnp.maximum(product, jnp.sqrt(square) / LONGEST)
        scale = norm[..., 0] * jnp.where(product <= 0, 0, scale)  # of zero vectors too
        return norms.stored(jnp.minimum(scale, norms.largest(self.dtype)), self.dtype), inner

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        decoded = self.inner.relaxed(norms.direction(x), leaf)
        product, square = (jnp.sum(a * decoded, axis=-1, keepdims=True) for a in (x, decoded))
        mse = self.mode == "mse"
        return (product / (square + norms.LEAST) if mse else norms.norm(x) ** 2 / (product + norms.LEAST)) * decoded


@pytree
class Rotated(Wrapper):
    """Quantizes R x. Codes: those of `inner`. Queries are rotated once and sums rotated back once, vectors never.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Rotated(rqjax.rotations.Hadamard.random(jax.random.key(0), 64), rqjax.lloyd_max(64, 3))
      Rotated(Hadamard(64), Scalar(3 bits))
    """

    rotation: Rotation
    inner: Quantizer

    def __post_init__(self):
        check_fits(rotation=getattr(self.rotation, "wide_dim", self.rotation.dim), inner=self.inner.dim)

    @property
    def dim(self) -> int:
        return self.rotation.dim

    def encode(self, x: Vectors) -> Codes:
        return self.inner.encode(self.rotation(check_vectors(x, self.dim)))

    def in_own_axes(self, function: Callable[..., Any], x: Shaped[Array, "*n d"], norm: Float[Array, "*n 1"]) -> Any:
        if self.rotation.dim != self.inner.dim:  # the rotation embeds
            return function(self, x, norm)

        def rotated(x: Array, norm: Array) -> Any:
            return self.inner.in_own_axes(function, self.rotation(x), norm)

        return _in_blocks(self.inner, rotated, x, norm) if self.rotation.blocked else rotated(x, norm)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return self.rotation.inverse(self.inner.decode(codes))

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return self.inner.prepare(self.rotation(y))  # <y, R^T x> = <R y, x>

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return self.rotation.inverse(self.inner.restore(sums))

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        return self.rotation.inverse(self.inner.relaxed(self.rotation(x), leaf))


@pytree
class Residual(Quantizer):
    """`second` quantizes what `first` left over. Codes: (first codes, second codes).

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Residual(rqjax.lloyd_max(64, 2), rqjax.Sign.gaussian(jax.random.key(0), 64)).bits_per_vector
      208
    """

    first: Quantizer
    second: Quantizer

    def __post_init__(self):
        check_fits(first=self.first.dim, second=self.second.dim)

    @property
    def heads(self) -> int | None:
        return self.first.heads or self.second.heads

    @property
    def tile(self) -> int:
        return math.lcm(self.first.tile, self.second.tile)

    @property
    def dim(self) -> int:
        return self.first.dim

    def encode(self, x: Vectors) -> Codes:
        x = check_vectors(x, self.dim)
        first = self.first.encode(x)
        return first, self.second.encode(as_float32(x) - self.first.decode(first))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        first, second = codes
        return self.first.decode(first) + self.second.decode(second)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return self.first.prepare(y), self.second.prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return self.first.scores(prepared[0], codes[0]) + self.second.scores(prepared[1], codes[1])

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return self.first.weigh(w, codes[0]), self.second.weigh(w, codes[1])

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return self.first.restore(sums[0]) + self.second.restore(sums[1])

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        return self.first.laid_out(codes[0], transposed), self.second.laid_out(codes[1], transposed)

    @property
    def in_integers(self) -> bool:
        return self.first.in_integers and self.second.in_integers

    @property
    def width(self) -> int:
        return max(self.first.width, self.second.width)


@pytree
class Split(Quantizer):
    """Consecutive channels go to different parts: 64 of 128 at 3 bits and 64 at 2 make 2.5. Codes: one per part.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Split((rqjax.lloyd_max(32, 3), rqjax.lloyd_max(32, 2))).bits_per_vector
      160
    """

    parts: tuple[Quantizer, ...]

    @property
    def dim(self) -> int:
        return sum(part.dim for part in self.parts)

    @property
    def tile(self) -> int:
        return math.lcm(*(part.tile for part in self.parts))

    @property
    def heads(self) -> int | None:
        return next((part.heads for part in self.parts if part.heads), None)

    @property
    def bits_per_vector(self) -> float | int:
        return sum(part.bits_per_vector for part in self.parts)

    def encode(self, x: Vectors) -> Codes:
        blocks = self.split(check_vectors(x, self.dim))
        return tuple(part.encode(block) for part, block in zip(self.parts, blocks, strict=True))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        blocks = [part.decode(code) for part, code in zip(self.parts, codes, strict=True)]
        return jnp.concatenate(blocks, axis=-1)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return tuple(part.prepare(block) for part, block in zip(self.parts, self.split(y), strict=True))

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return functools.reduce(operator.add, map(lambda part, y, c: part.scores(y, c), self.parts, prepared, codes))

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return tuple(part.weigh(w, code) for part, code in zip(self.parts, codes, strict=True))

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return jnp.concatenate([part.restore(some) for part, some in zip(self.parts, sums, strict=True)], axis=-1)

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        return tuple(part.laid_out(code, transposed) for part, code in zip(self.parts, codes, strict=True))

    @property
    def in_integers(self) -> bool:
        return all(part.in_integers for part in self.parts)

    @property
    def width(self) -> int:
        return max(part.width for part in self.parts)

    def split(self, x: Array) -> list[Array]:
        ends = [sum(part.dim for part in self.parts[: i + 1]) for i in range(len(self.parts) - 1)]
        return jnp.split(x, ends, axis=-1)


@pytree
class Centered(Wrapper):
    """Subtracts a mean first and adds it again. Codes: those of `inner`; the mean belongs to the quantizer.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.Centered(jnp.ones(64), rqjax.eden(jax.random.key(0), 64, 3)).dim
      64
    """

    mean: Float[Array, "d"]
    inner: Quantizer

    def __post_init__(self):
        check_fits(mean=self.mean, inner=self.inner.dim)

    def encode(self, x: Vectors) -> Codes:
        return self.inner.encode(as_float32(check_vectors(x, self.dim)) - self.mean)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return self.inner.decode(codes) + self.mean

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return inner(y, self.mean)[..., None], self.inner.prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return prepared[0] + self.inner.scores(prepared[1], codes)

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return w.sum(-1, keepdims=True), self.inner.weigh(w, codes)

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return self.inner.restore(sums[1]) + sums[0] * self.mean

    def relaxed(self, x: Float[Array, "*n d"], leaf: Callable[..., Array]) -> Float[Array, "*n d"]:
        return self.inner.relaxed(x - self.mean, leaf) + self.mean


def _in_blocks(inner: Quantizer, function: Callable[..., Any], x: Shaped[Array, "*n d"], norm: Array) -> Any:
    """Computes a function that encodes vectors by `inner`, in blocks of rows if it takes each vector alone."""
    return function(x, norm) if inner.heads or inner.tile > 1 else in_blocks(function, x, norm)


def _measured(
    inner: Quantizer, x: Shaped[Array, "*n d"], norm: Float[Array, "*n 1"]
) -> tuple[Codes, Float[Array, "*n"], Float[Array, "*n"]]:
    """Codes of directions, inner products of these with the decoded vectors, and squares of the decoded vectors."""
    codes = jax.tree.map(materialized, inner.encode_direction(x, norm))  # or each coordinate is encoded once more
    decoded = materialized(inner.decode(codes))  # or decoded once more
    product = jnp.sum(over(x, norm) * decoded, axis=-1)
    return codes, product, jnp.sum(decoded**2, axis=-1)
