"""Rows of arrays on a mesh of devices, of one process or several."""

from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree


def of_rows(mesh: Mesh, axis: str) -> NamedSharding:
    """Rows along an axis of a mesh, whose axes the compiler may use as it likes; a ValueError without such an axis."""
    if axis not in mesh.axis_names:
        raise ValueError(f"expected an axis of the mesh ({', '.join(mesh.axis_names)}), got {axis!r}")
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec(axis))


def own(sharding: NamedSharding) -> int:
    """How many shards this process has."""
    count = sharding.mesh.shape[sharding.spec[0]]
    return len(set(map(str, sharding.addressable_devices_indices_map((count,)).values())))


def even(rows: int, sharding: NamedSharding) -> int:
    """The least number of rows, from `rows` on, that fills all shards of this process as those of any other."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        rows = int(process_allgather(np.int32(rows)).max())
    return -(-rows // own(sharding)) * own(sharding)


def placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Arrays (rows, ...) of this process as a part of those of all processes."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, np.asarray(array)), tree)


def copied(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Arrays on all devices."""
    return placed(tree, NamedSharding(sharding.mesh, PartitionSpec()))


def gathered(
    function: Callable[..., PyTree], sharding: NamedSharding, quantizers: PyTree, rows: PyTree, y: Array
) -> PyTree:
    """`function(quantizers, rows, y)` of each shard of the rows; its arrays (m, k) side by side, on all devices."""
    mesh, copy, parted = sharding.mesh, PartitionSpec(), PartitionSpec(None, *sharding.spec)
    specs = {"mesh": mesh, "in_specs": (copy, sharding.spec, copy), "out_specs": parted}
    if hasattr(jax, "shard_map"):
        run = jax.shard_map(function, check_vma=False, **specs)
    else:  # before jax 0.6
        from jax.experimental.shard_map import shard_map

        run = shard_map(function, check_rep=False, **specs)
    return lax.with_sharding_constraint(run(quantizers, rows, y), NamedSharding(mesh, copy))
