"""Rows of an index on a mesh of devices, of one process or several."""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rqjax.core import mesh


def own(sharding: NamedSharding) -> int:
    """How many shards this process has."""
    return len(set(map(str, sharding.addressable_devices_indices_map((mesh.count(sharding),)).values())))


def even(rows: int, sharding: NamedSharding) -> int:
    """The least number of rows, from `rows` on, that fills all shards of this process as those of any other."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        rows = int(process_allgather(np.int32(rows)).max())
    return -(-rows // own(sharding)) * own(sharding)


def gathered(
    function: Callable[..., PyTree], sharding: NamedSharding, quantizers: PyTree, rows: PyTree, y: Array
) -> PyTree:
    """`function(quantizers, rows, y)` of each shard of the rows; its arrays (m, k) side by side, on all devices."""
    copy, parted = PartitionSpec(), PartitionSpec(None, *sharding.spec)
    found = mesh.mapped(function, sharding, (copy, sharding.spec, copy), parted)(quantizers, rows, y)
    return lax.with_sharding_constraint(found, mesh.everywhere(sharding))
