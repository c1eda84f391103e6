"""A quantizer of its own for each head."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from rqjax.core import Codes, Quantizer, Vectors, Wrapper, check_data, pytree


@pytree
class PerHead(Wrapper):
    """One quantizer per head: axis -3 of the vectors (*n, heads, tokens, d) is that of the heads. Codes: those of
    `inner`.

    The arrays of `inner` have the heads as their first axis, as `jax.vmap` makes them.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> keys = jax.random.split(jax.random.key(0), 2)
      >>> q = rqjax.PerHead(jax.vmap(lambda key: rqjax.eden(key, 64, 3))(keys))
      >>> q.decode(q.encode(jnp.ones((2, 10, 64)))).shape
      (2, 10, 64)
    """

    inner: Quantizer

    @property
    def heads(self) -> int:
        return jax.tree.leaves(self.inner)[0].shape[0]

    def encode(self, x: Vectors) -> Codes:
        if x.ndim < 3 or x.shape[-3] != self.heads:
            raise ValueError(f"expected vectors (..., {self.heads} heads, tokens, {self.dim}), got shape {x.shape}")
        return jax.vmap(lambda q, x: q.encode(x), (0, x.ndim - 3), x.ndim - 3)(self.inner, jnp.asarray(x))

    def decode(self, codes: Codes) -> Float[Array, "*n d"]:
        axis = self._axis(codes)
        return jax.vmap(lambda q, codes: q.decode(codes), (0, axis), axis)(self.inner, codes)

    def prepare(self, y: Float[Array, "b h r d"]) -> Any:
        return over_heads(lambda q, y: q.prepare(y))(self, y)

    def scores(self, prepared: Any, codes: Codes) -> Float[Array, "b h r t"]:
        return over_heads(lambda q, y, codes: q.scores(y, codes))(self, prepared, codes)

    def weigh(self, w: Float[Array, "b h r t"], codes: Codes) -> Any:
        return over_heads(lambda q, w, codes: q.weigh(w, codes))(self, w, codes)

    def restore(self, sums: Any) -> Float[Array, "b h r d"]:
        return over_heads(lambda q, sums: q.restore(sums))(self, sums)

    def laid_out(self, codes: Codes, transposed: bool) -> Codes:
        return over_heads(lambda q, codes: q.laid_out(codes, transposed))(self, codes)

    def _axis(self, codes: Codes) -> int:
        """The axis of the heads in all arrays of `codes`."""

        def one(inner, codes):
            return jax.tree.map(lambda leaf: leaf[0], inner).decode(codes)

        return len(jax.eval_shape(one, self.inner, codes).shape) - 3


def over_heads(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Maps `function(quantizer, *arrays)` over the heads of a `PerHead` and of arrays (batch, heads, ...)."""

    def one(quantizer: Quantizer, *arrays: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.squeeze(x, 1), function(quantizer, *_single(arrays)))

    return lambda quantizer, *arrays: jax.vmap(one, (0, *[1] * len(arrays)), 1)(quantizer.inner, *arrays)


def _single(arrays: PyTree) -> PyTree:
    """Inserts an axis of one head."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, 1), arrays)


def stack_heads(x: Array) -> tuple[Float[Array, "heads n d"], Callable[[Quantizer], Quantizer]]:
    """Returns vectors (heads, n, d) in float32 of an x (n, d) or (heads, n, d), and a function of stacked quantizers.
    It makes a quantizer for x of quantizers with the heads as the first axis of their arrays.

    Raises:
      ValueError: x has another shape or dtype, or nothing can be learned from it.
    """
    x = jnp.asarray(x)
    if x.ndim not in (2, 3) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"expected floating-point vectors (n, d) or (heads, n, d), got {x.dtype} {x.shape}")
    for vectors in x if x.ndim == 3 else x[None]:
        check_data("x", vectors)
    if x.ndim == 3:
        return x.astype(jnp.float32), PerHead
    return x[None].astype(jnp.float32), lambda quantizers: jax.tree.map(lambda leaf: leaf[0], quantizers)
