"""Quantizers of what vectors leave of centers: one center for all, or the nearest of many."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rqjax.arrays import blocks, norms
from rqjax.arrays.kmeans import nearest
from rqjax.arrays.planes import as_float32
from rqjax.core import (
    Codes,
    Quantizer,
    Vectors,
    as_array,
    check_fits,
    check_vectors,
    is_traced,
    operation,
    pytree,
    static,
)
from rqjax.quantizers.combinators import Centered
from rqjax.quantizers.exact import Exact

SAMPLE = 4096
"""Vectors that show where the center is and what it saves, at most."""
COORDINATES = 2**22
"""Coordinates of these, at most."""
SAVED = 0.1
"""Least share of the error that a center saves, where one is subtracted without being asked for."""
LEARNED = 20_000
"""Vectors that a function fits a quantizer to, at most."""


class Less(Quantizer):
    """Codes of vectors less a center. They decode to the center plus `gain` times what `inner` decodes.

    A loss e of the codes errs by <q, e> in the product with a query q, most of it along the center where that is far
    from the origin. With `along`, codes are (shares float32 (*n,), inner codes). A share is of the center, and what it
    adds makes the product of the center with a decoded vector that with the vector. The error is then that of
    <q - a center, e>, with the best a for each query.
    """

    inner: Quantizer
    gain: Float[Array, ""]
    along: bool

    @property
    def dim(self) -> int:
        return self.inner.dim

    def encode_less(self, center: Float[Array, "... d"], x: Float[Array, "*n d"]) -> Codes:
        codes = self.inner.encode(x - center)
        if not self.along:
            return codes
        lost = x - center - self.gain * self.inner.decode(codes)
        energy = jnp.sum(center**2, axis=-1)
        return jnp.sum(lost * center, axis=-1) / jnp.where(energy > 0, energy, 1), codes

    def decode_less(self, center: Float[Array, "... d"], codes: Codes) -> Float[Array, "*n d"]:
        shares = 1 + codes[0][..., None] if self.along else 1
        return self.gain * self.inner.decode(self.own(codes)) + shares * center

    def own(self, codes: Codes) -> Codes:
        """Codes of `inner`."""
        return codes[1] if self.along else codes

    def shared(self, near: Float[Array, "..."], codes: Codes) -> Float[Array, "..."]:
        """Products with the centers' part of decoded vectors, from those with the centers."""
        return near * (1 + codes[0]) if self.along else near


@pytree
class Around(Less):
    """`Less` with one center for all vectors, and shares of it."""

    center: Float[Array, "d"]
    inner: Quantizer
    gain: Float[Array, ""]
    along = True

    def __post_init__(self):
        check_fits(center=self.center, inner=self.inner.dim)

    def encode(self, x: Vectors) -> Codes:
        return self.encode_less(self.center, as_float32(check_vectors(x, self.dim)))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return self.decode_less(self.center, codes)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return blocks.inner(y, self.center)[..., None], self.inner.prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        shares, inner = codes
        return self.gain * self.inner.scores(prepared[1], inner) + prepared[0] * (1 + shares[:, :, None])

    @property
    def in_integers(self) -> bool:
        return self.inner.in_integers

    @property
    def width(self) -> int:
        return self.inner.width


@pytree
class Cells(Less):
    """`Less` with the nearest of many centroids, or none of them. Codes: (cells int32 (*n,), those of `Less`).

    All cells have the same inner quantizer; `PerCell` has one for each.
    """

    centroids: Float[Array, "cells d"]
    inner: Quantizer
    gain: Float[Array, ""]
    residual: bool = static(default=True, kw_only=True)
    """True if the centroid is subtracted."""
    along: bool = static(default=False, kw_only=True)

    def __post_init__(self):
        check_fits(centroids=self.centroids, inner=self.inner.dim)

    def encode(self, x: Vectors) -> Codes:
        x = as_float32(check_vectors(x, self.dim))
        cell = nearest(x.reshape(-1, self.dim), self.centroids).reshape(x.shape[:-1]).astype(jnp.int32)
        return cell, self.encode_less(self.origins[cell], x)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return self.decode_less(self.origins[codes[0]], codes[1])

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return blocks.inner(y, self.origins), self.inner.prepare(y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        (near, prepared), (cell, codes) = prepared, codes
        near = jax.vmap(jax.vmap(lambda near, cell: near[:, cell]))(near, cell)
        own = self.gain * self.inner.scores(prepared, self.own(codes))
        return own + self.shared(near, (codes[0][:, :, None],) if self.along else codes)

    @property
    def origins(self) -> Float[Array, "cells d"]:
        """Centers of the lists; 0 if none is subtracted."""
        return self.centroids if self.residual else jnp.zeros_like(self.centroids)


def sampled(x: Any, *, to_fit: bool = False) -> Float[Array, "n d"]:
    """Some of the vectors (n, d), evenly spaced: as many as show what codes lose, or more to fit a quantizer to."""
    count = min(len(x), LEARNED if to_fit else min(SAMPLE, max(1, COORDINATES // x.shape[1])))
    some = x if count == len(x) else x[np.linspace(0, len(x) - 1, count).astype(np.int64)]
    return as_float32(jnp.asarray(as_array(some)))


def fitted(quantizer: Any, x: Float[Array, "n d"]) -> Quantizer:
    """Returns a quantizer as it is, or the one that a function fits to vectors."""
    if isinstance(quantizer, Quantizer):
        return quantizer
    if len(x) < 2:
        raise ValueError(f"expected at least 2 vectors to fit a quantizer to, got {len(x)}")
    made = quantizer(x)
    if not isinstance(made, Quantizer):
        raise TypeError(f"expected a function that returns a quantizer, got {made!r} of it")
    check_single(made)
    return made


def check_single(quantizer: Quantizer) -> None:
    """Raises a ValueError if codes are of several vectors together."""
    if quantizer.tile > 1:
        raise ValueError(f"expected codes of one vector each, got those of {quantizer.tile} vectors together")


def centered(quantizer: Any, x: Any, metric: str) -> tuple[Quantizer, Float[Array, "d"] | None]:
    """Returns a quantizer, and a center that is subtracted before it, for the metric "l2". For others the quantizer has
    the center.

    The center is the mean of `Centered`, or that of a sample of the vectors `x`. The latter is taken if codes of what
    is left err less, and for the metric "l2" if `Exact` keeps vectors as they are. Vectors must be known, not traced.
    A function fits a quantizer to what is left: for the metric "l2", and where the mean has a tenth of the energy.

    Products and energies of vectors far from the origin are large, and float32 loses the distances that are left of
    them.
    """
    given, learns = isinstance(quantizer, Centered), not isinstance(quantizer, Quantizer)
    inner = quantizer.inner if given else quantizer
    if not given and len(x) < 2:  # one vector is its own mean, and far from those that come
        return fitted(quantizer, sampled(x)), None
    sample = sampled(x, to_fit=learns)
    sample = norms.direction(sample) if metric == "cosine" else sample
    center = jnp.asarray(quantizer.mean) if given else sample.mean(axis=0)
    if learns:
        pays = metric == "l2" or _holds_energy(center, sample)
        inner = fitted(quantizer, sample - center if pays else sample)
    else:
        pays = given or (metric == "l2" if isinstance(inner, Exact) else _pays(inner, sample, center))
    if not pays:
        return inner, None
    if metric == "l2":
        return inner, center
    return Around(center, inner, measured(inner, sampled(sample) - center)[1]), None


def _pays(quantizer: Quantizer, x: Float[Array, "n d"], center: Float[Array, "d"]) -> bool:
    """Returns whether codes of vectors less a center err less."""
    if any(map(is_traced, jax.tree.leaves(quantizer))) or not _holds_energy(center, x):
        return False
    return bool(measured(quantizer, x - center)[0] < (1 - SAVED) * measured(quantizer, x)[0])


def _holds_energy(center: Float[Array, "d"], x: Float[Array, "n d"]) -> bool:
    """Returns whether the center of vectors that are known has a share `SAVED` of their energy."""
    if is_traced(x):
        return False
    own = len(x) / (len(x) - 1)  # a mean of few vectors is near them by chance
    return bool(own * jnp.sum((x - center) ** 2) < (1 - SAVED) * jnp.sum(x**2))


@operation
def measured(quantizer: Quantizer, x: Float[Array, "n d"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Measures the squared error of codes, and the gain by which products of vectors and decoded ones are the vectors'
    energy."""
    decoded = quantizer.decode(quantizer.encode(x))
    product = jnp.sum(x * decoded)
    return jnp.sum((x - decoded) ** 2), jnp.where(product > 0, jnp.sum(x**2) / product, 1.0)
