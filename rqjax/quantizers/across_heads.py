"""A quantizer of the vectors of several heads together."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from rqjax.core import Codes, Quantizer, Vectors, Wrapper, pytree, static


@pytree
class AcrossHeads(Wrapper):
    """Quantizes the vectors that `group` neighboring heads have of a token as one vector, side by side.

    Axis -3 of the vectors (*n, heads, tokens, d) is that of the heads. They are one group, or as many groups as `inner`
    has heads. What heads have in common is in codes once. Codes: those of `inner`, with groups in the place of heads.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.AcrossHeads(rqjax.eden(jax.random.key(0), 3 * 64, 3), group=3)
      >>> q.decode(q.encode(jnp.ones((3, 10, 64)))).shape
      (3, 10, 64)
      >>> q.bits_per_vector  # a third of 16 bits for the scale
      197.33333333333334
    """

    inner: Quantizer
    group: int = static(kw_only=True)

    def __post_init__(self):
        if self.inner.dim % self.group:
            raise ValueError(f"expected vectors of {self.group} heads alike, got inner of dimension {self.inner.dim}")

    @property
    def dim(self) -> int:
        return self.inner.dim // self.group

    @property
    def heads(self) -> int:
        return (self.inner.heads or 1) * self.group

    @property
    def bits_per_vector(self) -> float | int:
        return self.inner.bits_per_vector / self.group

    def encode(self, x: Vectors) -> Codes:
        if x.ndim < 3 or x.shape[-3] != self.heads:
            raise ValueError(f"expected vectors (..., {self.heads} heads, tokens, {self.dim}), got shape {x.shape}")
        x = jnp.asarray(x).reshape(*x.shape[:-3], -1, self.group, *x.shape[-2:])
        return self.inner.encode(jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-3], x.shape[-2], self.inner.dim))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        x = self.inner.decode(codes)
        x = jnp.swapaxes(x.reshape(*x.shape[:-1], self.group, self.dim), -3, -2)
        return x.reshape(*x.shape[:-4], self.heads, *x.shape[-2:])

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        """Prepares each head's queries with zeros for the other heads of its group."""
        own = jnp.eye(self.group)[:, None, :, None]
        y = y.reshape(len(y), -1, self.group, y.shape[2], 1, self.dim) * own
        return self.inner.prepare(y.reshape(*y.shape[:2], -1, self.inner.dim))

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return self._apart(self.inner.scores(prepared, codes))

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return jax.tree.map(self._apart, self.inner.weigh(self._together(w), codes))

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        x = self._apart(self.inner.restore(jax.tree.map(self._together, sums)))
        x = x.reshape(len(x), -1, self.group, x.shape[2], self.group, self.dim)
        x = jnp.diagonal(x, axis1=2, axis2=4)  # of the sums of each head its own coordinates: (b, groups, r, d, group)
        return jnp.moveaxis(x, -1, 2).reshape(len(x), self.heads, *x.shape[2:4])

    def _apart(self, x: Shaped[Array, "b groups rows n"]) -> Shaped[Array, "b h r n"]:
        return x.reshape(len(x), self.heads, -1, x.shape[3])

    def _together(self, x: Shaped[Array, "b h r n"]) -> Shaped[Array, "b groups rows n"]:
        return x.reshape(len(x), -1, self.group * x.shape[2], x.shape[3])
