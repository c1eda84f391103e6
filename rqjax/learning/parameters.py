"""The floating-point arrays of a quantizer, which alone have gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rqjax.core import Quantizer

Where = Callable[[Any], Any]
"""Function that picks the trained part of a quantizer: `lambda q: q.inner.rotation`, or a tuple of parts."""


def parameters(
    quantizer: Quantizer, where: Where = lambda q: q
) -> tuple[list[Array], Callable[[list[Array]], Quantizer]]:
    """Takes out what `jax.grad` and optax can take: a quantizer's floating-point arrays. Its integers (levels in int8,
    signs, permutations) have no gradient and are left out.

    Args:
      quantizer: any.
      where: the part of it: `lambda q: q.inner.rotation`, or a tuple of parts.

    Returns:
      The arrays, and a function of such arrays that returns the quantizer which has them.

    Raises:
      ValueError: the part has no floating-point array.

    Example:
      >>> import jax, rqjax
      >>> q = rqjax.rotorquant(jax.random.key(0), dim=12, bits=2)
      >>> x = jax.random.normal(jax.random.key(1), (5, 12))
      >>> params, rebuild = rqjax.parameters(q, where=lambda q: q.inner.rotation.bivectors)
      >>> loss = lambda params: rqjax.metrics.relative_mse(x, rqjax.straight_through(rebuild(params), x))
      >>> [gradient.shape for gradient in jax.grad(loss)(params)]
      [(4, 3)]
    """
    picked, leaves = places(where, quantizer), jax.tree.leaves(quantizer)
    return [leaves[place] for place in picked], functools.partial(with_parameters, quantizer, picked)


def places(where: Where, quantizer: Quantizer) -> tuple[int, ...]:
    """Finds the leaves that `where` picks."""
    leaves, structure = jax.tree.flatten(quantizer)
    picked = jax.tree.leaves(where(jax.tree.unflatten(structure, list(range(len(leaves))))))
    floating = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    places = tuple(i for i in sorted(set(picked)) if i in floating)
    if not places:
        paths = jax.tree_util.tree_flatten_with_path(quantizer)[0]
        names = [f"q{jax.tree_util.keystr(paths[i][0])}" for i in floating]
        raise ValueError(f"where picks no floating-point array of the quantizer; it has {', '.join(names) or 'none'}")
    return places


def with_parameters(quantizer: Quantizer, places: tuple[int, ...], params: list[Array]) -> Quantizer:
    """Puts other arrays in some places of the quantizer."""
    leaves, structure = jax.tree.flatten(quantizer)
    for place, value in zip(places, params, strict=True):
        leaves[place] = value
    return jax.tree.unflatten(structure, leaves)
