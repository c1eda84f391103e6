"""A transform code of several heads together, without training."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rqjax.core import Key, Quantizer
from rqjax.quantizers.across_heads import AcrossHeads
from rqjax.quantizers.linear import Linear
from rqjax.quantizers.per_head import PerHead, stack_heads
from rqjax.recipes.fitted import fitted
from rqjax.recipes.klt import klt_trellis

WIDEST = 256
"""Most coordinates that are transformed together."""
POWER = 0.25
"""Power of the second moment of queries that keys are multiplied by. 0.5 would make the error of scores least if fitted
and coded keys were alike; 0 knows of no queries."""
FLOOR = 1e-3
"""Least eigenvalue of a moment over their mean: text that was not fitted to may ask for any direction."""


@fitted
def klt_joint(
    key: Key, x: Array, bits: float | int, queries: Array | None = None, keys: Array | None = None
) -> Quantizer:
    """`klt_trellis` of the vectors that neighboring heads have of a token, side by side: one transform, one scale.

    As many heads are transformed together as divide their number and have at most 256 coordinates. Their keys depend on
    one another, and so do their values, so that principal axes of all hold more of the energy. Keys are coded between
    their own metric and that of their queries, if these are given by their second moments, (d, d) or (heads, d, d).
    """
    x, unstack = stack_heads(x)
    heads, _, dim = x.shape
    group = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * dim <= WIDEST))
    x = jnp.swapaxes(x.reshape(-1, group, *x.shape[1:]), 1, 2).reshape(heads // group, -1, group * dim)
    if queries is None or keys is not None:
        inner = klt_trellis(key, x, bits).inner
    else:
        roots = [_roots(moment) for moment in jnp.asarray(queries).reshape(heads, dim, dim)]
        matrix, inverse = (_blocks(side, group) for side in zip(*roots, strict=True))
        x = jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)  # its blocks are symmetric
        inner = Linear(matrix, inverse, klt_trellis(key, x, bits).inner)
    if group == 1:
        return unstack(inner)
    one = jax.tree.map(lambda leaf: leaf[0], inner)
    return AcrossHeads(one if group == heads else PerHead(inner), group=group)


def _roots(moment: Float[Array, "d d"]) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """Returns the power of a moment that keys are multiplied by, and its inverse."""
    values, axes = jnp.linalg.eigh(moment)
    scale = jnp.maximum(values, FLOOR * values.mean()) ** POWER
    up, down = (jnp.matmul(axes * some, axes.T, precision=lax.Precision.HIGHEST) for some in (scale, 1 / scale))
    return up, down


def _blocks(matrices: tuple[Float[Array, "d d"], ...], group: int) -> Float[Array, "groups d d"]:
    """Stacks block-diagonal matrices of `group` blocks each."""
    parts = [matrices[i : i + group] for i in range(0, len(matrices), group)]
    return jnp.stack([jax.scipy.linalg.block_diag(*part) for part in parts])
