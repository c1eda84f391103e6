"""Quantizers of the vectors of several heads together, and of values whose keys are known."""

from dataclasses import field
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

    def encode(self, x: Vectors) -> Codes:
        if x.ndim < 3 or x.shape[-3] != self.heads:
            raise ValueError(f"expected vectors (..., {self.heads} heads, tokens, {self.dim}), got shape {x.shape}")
        return self.inner.encode(beside(jnp.asarray(x), self.group))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        return self.by_head(self.inner.decode(codes))

    def by_head(self, x: Float[Array, "*n groups tokens group_d"]) -> Float[Array, "*n heads tokens d"]:
        """Takes vectors side by side (..., groups, tokens, group * d) apart: (..., heads, tokens, d)."""
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
        return self.own(self.restored(sums))

    def restored(self, sums: Any) -> Float[Array, "b groups rows n"]:
        """Converts sums to the vectors of all heads of a group, for the rows of each."""
        return self.inner.restore(jax.tree.map(self._together, sums))

    def own(self, x: Float[Array, "b groups rows n"]) -> Float[Array, "b h r d"]:
        """Takes of `restored` the coordinates of the head that the weights are of."""
        x = x.reshape(*x.shape[:2], self.group, x.shape[2] // self.group, self.group, self.dim)
        x = jnp.diagonal(x, axis1=2, axis2=4)  # (b, groups, r, d, group)
        return jnp.moveaxis(x, -1, 2).reshape(len(x), self.heads, *x.shape[2:4])

    def _apart(self, x: Shaped[Array, "b groups rows n"]) -> Shaped[Array, "b h r n"]:
        return x.reshape(len(x), self.heads, -1, x.shape[3])

    def _together(self, x: Shaped[Array, "b h r n"]) -> Shaped[Array, "b groups rows n"]:
        return x.reshape(len(x), -1, self.group * x.shape[2], x.shape[3])


@pytree
class GivenKeys(Wrapper):
    """Quantizes what is left of values when a linear function of their decoded keys is taken off them.

    Keys and values of a layer are products of one vector, so that keys tell much of the values. A cache whose
    `key_quantizer` is an `AcrossHeads` of as many heads takes it as `value_quantizer`, and fills in `keys`. Codes to
    decode are pairs, of keys and of what is left.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> keys, left = (rqjax.AcrossHeads(rqjax.eden(jax.random.key(i), 3 * 64, 3), group=3) for i in range(2))
      >>> values = rqjax.GivenKeys(left, prediction=jnp.eye(3 * 64)[None])
      >>> rqjax.KVCache.init(1, 3, 512, keys, values).value_quantizer.keys is None
      False
    """

    inner: AcrossHeads  # pyright: ignore[reportIncompatibleVariableOverride]
    prediction: Float[Array, "groups n n"] = field(kw_only=True)
    """Matrix of each group: decoded keys side by side times it are the values expected."""
    keys: Any = field(kw_only=True, default=None)
    """Quantizer of the keys; a cache fills it in."""

    def __post_init__(self):
        n = self.inner.inner.dim
        if self.prediction.shape != (self.inner.heads // self.inner.group, n, n):
            raise ValueError(f"expected a prediction of {n} by {n} numbers a group, got {self.prediction.shape}")

    @property
    def bits_per_vector(self) -> float | int:
        return self.inner.bits_per_vector

    def encode(self, x: Vectors) -> Codes:
        """Encodes what is left of values."""
        return self.inner.encode(x)

    def left(self, x: Vectors, of_keys: Codes) -> Float[Array, "*n d"]:
        """Returns what is left of values x, given the codes of their keys."""
        return jnp.asarray(x) - self._predicted(of_keys)

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        of_keys, left = codes
        return self.inner.decode(left) + self._predicted(of_keys)

    prepare, scores = Quantizer.prepare, Quantizer.scores  # which decode

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        of_keys, left = codes
        return self.keys.weigh(w, of_keys), self.inner.weigh(w, left)

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        of_keys, left = sums
        return self.inner.own(self.inner.restored(left) + self._times(self.keys.restored(of_keys)))

    def _predicted(self, of_keys: Codes) -> Float[Array, "*n d"]:
        return self.inner.by_head(self._times(self.keys.inner.decode(of_keys)))

    def _times(self, x: Float[Array, "*m groups rows n"]) -> Float[Array, "*m groups rows n"]:
        return jnp.matmul(x, self.prediction, precision="highest")


def beside(x: Float[Array, "*n heads tokens d"], group: int) -> Float[Array, "*n groups tokens group_d"]:
    """Puts the vectors that `group` neighboring heads have of a token side by side."""
    *lead, heads, tokens, dim = x.shape
    x = jnp.swapaxes(x.reshape(*lead, -1, group, tokens, dim), -3, -2)
    return x.reshape(*lead, heads // group, tokens, group * dim)
