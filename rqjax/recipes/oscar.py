"""A rotation to mixed principal axes of what attention sees, without training."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.codebooks import MAX_BITS
from rqjax.core import Key, Quantizer, check_int
from rqjax.quantizers.affine import MinMax
from rqjax.quantizers.clipped import Clipped
from rqjax.quantizers.combinators import Rotated
from rqjax.quantizers.per_head import stack_heads
from rqjax.recipes.fitted import fitted
from rqjax.rotations import Dense
from rqjax.rotations.hadamard import transform

GROUP = 128
"""Numbers that share a scale, as in OSCAR's paper."""
CLIPPED_KEYS, CLIPPED_VALUES = 0.96, 0.92
"""Share of coordinates whose magnitude is kept, as OSCAR's servers are started."""


@fitted
def oscar(key: Key, x: Array, bits: int, queries: Array | None = None, keys: Array | None = None) -> Quantizer:
    """OSCAR: the rotation U H P, then whole numbers on a grid between the least and the largest of a token's clipped
    coordinates, in groups of 128.

    U has principal axes, H is a Hadamard matrix, P the order of reversed bits, which is of no effect in one group. Keys
    take axes of their queries, if these are given by their second moments, (d, d) or (heads, d, d). Values, if their
    keys are given too, take axes of values weighted by the mean squared score of their keys. Else the axes are those of
    x itself. The weights are those of raw scores, not of attention: the diagonal of S^T S for S = Q K^T. OSCAR's code
    computes this for what its paper writes as V^T S^T S V. All heads have the rotation of their mean, as in the paper,
    which has 32 bits for a scale where 16 are here.

    Source: Zhou et al., 2026, arXiv:2605.17757; FutureMLS-Lab/OSCAR, `rotation/compute_kv_rotation.py` (qqt_sst,
    r_h_pbr).
    """
    del key
    check_int("bits", bits, 1, MAX_BITS)
    x, unstack = stack_heads(x)
    dim = x.shape[-1]
    group = GROUP if dim % GROUP == 0 else dim
    grid = Clipped(
        MinMax(dim, bits, group_size=group, dtype="float16"), share=CLIPPED_KEYS if keys is None else CLIPPED_VALUES
    )
    axes = Dense.principal(_moment(x, queries, keys)).matrix[::-1].T  # in columns, the quietest first
    rotated = Rotated(Dense(transform(axes)[:, _order(dim)].T), grid)
    return unstack(jax.tree.map(lambda leaf: jnp.stack([leaf] * len(x)), rotated))


def _moment(x: Float[Array, "heads n d"], queries: Array | None, keys: Array | None) -> Float[Array, "d d"]:
    """Second moment whose principal axes are taken, mean over the heads."""
    weights = jnp.ones(x.shape[:2])
    if queries is not None:
        queries = jnp.asarray(queries).reshape(len(x), *x.shape[2:] * 2)
        if keys is None:
            return queries.mean(axis=0)
        keys = jnp.asarray(keys).reshape(x.shape)
        weights = jnp.einsum("hnd,hde,hne->hn", keys, queries, keys, precision=lax.Precision.HIGHEST)
    weights = weights / weights.sum(axis=1, keepdims=True) / len(x)
    return jnp.einsum("hn,hnd,hne->de", weights, x, x, precision=lax.Precision.HIGHEST)


def _order(dim: int) -> Int[np.ndarray, "d"]:
    """Coordinates in the order of their reversed bits; the last ones, which are of the loudest axes, come first."""
    digits = max(1, math.ceil(math.log2(dim)))
    return dim - 1 - np.array(sorted(range(dim), key=lambda i: f"{i:0{digits}b}"[::-1]))
