"""A transform code of several heads together, without training."""

import jax.numpy as jnp
from jaxtyping import Array

from rqjax.core import Key, Quantizer
from rqjax.quantizers.across_heads import AcrossHeads
from rqjax.quantizers.per_head import stack_heads
from rqjax.recipes.fitted import fitted
from rqjax.recipes.klt import klt_trellis

WIDEST = 256
"""Most coordinates that are transformed together."""


@fitted
def klt_joint(key: Key, x: Array, bits: float | int) -> Quantizer:
    """`klt_trellis` of the vectors that neighboring heads have of a token, side by side: one transform, one scale.

    Keys of different heads depend on one another, and so do values, so that principal axes of all hold more of the
    energy. As many heads are transformed together as divide their number and have at most 256 coordinates.
    """
    stacked, _ = stack_heads(x)
    heads, count, dim = stacked.shape
    group = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * dim <= WIDEST))
    if group == 1:
        return klt_trellis(key, x, bits)
    beside = jnp.swapaxes(stacked.reshape(-1, group, count, dim), 1, 2).reshape(-1, count, group * dim)
    return AcrossHeads(klt_trellis(key, beside[0] if group == heads else beside, bits), group=group)
