"""Transform codes as the decode attention kernel takes them: columns of whole numbers, looked up by bits of a ring.

Each coordinate has one column for each unit of its part. The mean is a column whose number is always 1.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rqjax.arrays.blocks import inner
from rqjax.backends.hopper_calls import kernel
from rqjax.quantizers.per_coordinate import PerCoordinate
from rqjax.quantizers.trellis_per_coordinate import TrellisPerCoordinate
from rqjax.scoring.ring_codes import placed, scaled

TransformCode: TypeAlias = TrellisPerCoordinate | PerCoordinate
COLUMNS, BYTES = 64, 128
"""Multiples to which the numbers of columns, and of bytes of levels, are padded."""


def lookup(code: Any, *, per_head: bool) -> Any:
    """The kernel's `Lookup` of a transform code, whose arrays have the heads first if it is `per_head`."""
    first = jax.tree.map(lambda x: x[0], code) if per_head else code
    columns, at = [], 0
    for part in first.parts:
        for table in part.tables:
            count, size = table.shape
            width = size.bit_length() - 1
            place = at + size * (np.arange(len(part.ends)) % count)
            columns.append([part.ends - width, np.full(len(part.ends), width), place])
            at += table.size
    numbers = np.concatenate(columns, axis=1).astype(np.int32)
    levels = jax.vmap(_levels)(code) if per_head else _levels(code)[None]
    return kernel("columns").Lookup(*_padded(numbers, COLUMNS), _padded(levels, BYTES))


def queries(code: TransformCode, y: Float[Array, "b h r d"]) -> Float[Array, "b h r columns"]:
    """Queries in the kernel's columns."""
    return jnp.concatenate([_padded(scaled(code.parts, y), COLUMNS), inner(y, code.center)[..., None]], axis=-1)


def restored(code: TransformCode, sums: Float[Array, "b h r columns"]) -> Float[Array, "b h r d"]:
    """Converts the kernel's sums to sums of vectors."""
    return placed(code.parts, sums[..., :-1], code.dim) + sums[..., -1:] * code.center


def _levels(code: TransformCode) -> Array:
    return jnp.concatenate([table.reshape(-1) for part in code.parts for table in part.tables])


def _padded(x: Any, multiple: int) -> Any:
    return (np if isinstance(x, np.ndarray) else jnp).pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])
