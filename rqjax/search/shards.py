"""Rows of an index on a mesh of devices, of one process or several."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, PyTree

from rqjax.core import mesh, treefile
from rqjax.search.ids import halves, wide
from rqjax.search.rows import Rows, grow, taken


def own(sharding: NamedSharding) -> int:
    """Number of shards that this process has."""
    return len(set(map(str, sharding.addressable_devices_indices_map((mesh.count(sharding),)).values())))


def even(rows: int, sharding: NamedSharding) -> int:
    """Least number of rows, from `rows` on, that fills all shards of this process as those of any other."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        rows = int(process_allgather(np.int32(rows)).max())
    return -(-rows // own(sharding)) * own(sharding)


def check_same(parts: PyTree) -> None:
    """Raises a ValueError if quantizers and centers differ among processes."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        if len(np.unique(process_allgather(np.int32(int(treefile.digest(parts)[:7], 16))))) > 1:
            raise ValueError("expected the same quantizers and centers in all processes, got different ones")


def parted(
    rows: Rows, starts: Int32[Array, "bounds"] | None, sharding: NamedSharding
) -> tuple[Rows, Int32[np.ndarray, "bounds"] | None]:
    """Deals rows out, shard after shard, and finds where in its shard each list begins. Lists are dealt out, the
    longest first, each to the shard with the fewest rows."""
    rows, count = _as_elsewhere(rows), len(rows.ids)
    if starts is None:
        return grow(rows, even(count, sharding) - count), None
    sizes, shards = np.diff(starts), own(sharding)
    loads, of = np.zeros(shards, int), np.zeros(len(sizes), int)
    for i in np.argsort(-sizes, kind="stable"):
        of[i] = loads.argmin()
        loads[of[i]] += sizes[i]
    size, shard_of_row = even(int(loads.max()) * shards, sharding) // shards, np.repeat(of, sizes)
    places = np.full((shards, size), count)
    for i in range(shards):
        places[i, : loads[i]] = np.flatnonzero(shard_of_row == i)
    firsts = np.pad(np.cumsum(sizes * (of == np.arange(shards)[:, None]), axis=1), ((0, 0), (1, 0)))
    return taken(rows, places.reshape(-1)), firsts.reshape(-1).astype(np.int32)


def _as_elsewhere(rows: Rows) -> Rows:
    """Rows with ids in halves if those of a process are."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import process_allgather

        if process_allgather(np.int32(wide(rows.ids))).any():
            return dataclasses.replace(rows, ids=halves(rows.ids))
    return rows


def gathered(
    function: Callable[..., PyTree], sharding: NamedSharding, quantizers: PyTree, rows: PyTree, y: Array
) -> PyTree:
    """Runs `function(quantizers, rows, y)` on each shard of the rows; its arrays (m, k) come side by side, on all
    devices."""
    copy, parted = PartitionSpec(), PartitionSpec(None, *sharding.spec)
    found = mesh.mapped(function, sharding, (copy, sharding.spec, copy), parted)(quantizers, rows, y)
    return lax.with_sharding_constraint(found, mesh.everywhere(sharding))
