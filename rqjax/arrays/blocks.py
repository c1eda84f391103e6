"""Functions of many rows, a block of rows at a time."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, platforms
from rqjax.core.mesh import varying

BLOCK_COORDINATES = 2**20
"""Coordinates in a block of rows that are processed together: 4 MiB in float32."""


def in_blocks(function: Callable[..., Codes], *arrays: Shaped[Array, "..."], rows: int | None = None) -> Codes:
    """Computes `function(*arrays)`, a function of rows, in blocks of `rows` rows; by default a block's temporaries fit
    in cache.

    On the CPU a large temporary costs more in page faults than in arithmetic; elsewhere blocks are made only where
    `rows` asks for them. The arrays share their leading axes. The last block overlaps the one before where the rows do
    not come out even.
    """
    lead = arrays[0].shape[:-1]
    count, whole = math.prod(lead), rows is None and not platforms.on_cpu()
    rows = rows or max(1, BLOCK_COORDINATES // arrays[0].shape[-1])
    if whole or count < 2 * rows:
        return function(*arrays)
    flat = [a.reshape(count, -1) for a in arrays]

    def block(i, out):
        start = jnp.minimum(i * rows, count - rows)
        part = function(*(lax.dynamic_slice_in_dim(a, start, rows) for a in flat))
        return jax.tree.map(lambda o, p: lax.dynamic_update_slice_in_dim(o, p, start, 0), out, part)

    shapes = jax.eval_shape(function, *(a[:rows] for a in flat))
    empty = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), shapes)
    out = lax.fori_loop(0, -(-count // rows), block, varying(empty, flat))
    return jax.tree.map(lambda o: o.reshape(*lead, *o.shape[1:]), out)


def inner(y: Shaped[Array, "*m d"], x: Float[Array, "*n d"]) -> Float[Array, "*mn"]:
    """Inner products of all queries with all vectors."""
    return jnp.tensordot(as_float32(y), x, axes=(-1, -1), precision=lax.Precision.HIGHEST)
