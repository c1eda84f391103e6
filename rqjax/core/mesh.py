"""Arrays on a mesh of devices, of one process or several."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree


def along(mesh: Any, axis: Any) -> NamedSharding:
    """Sharding of rows along an axis of a mesh, whose axes the compiler may use as it likes.

    Raises:
      TypeError: it is no mesh.
      ValueError: it has no such axis.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"expected a jax.sharding.Mesh of devices, got {mesh!r}")
    if axis not in mesh.axis_names:
        raise ValueError(f"expected an axis of the mesh ({', '.join(mesh.axis_names)}), got {axis!r}")
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec(axis))


def count(sharding: NamedSharding) -> int:
    """Number of shards of the rows."""
    return sharding.mesh.shape[sharding.spec[0]]


def everywhere(sharding: NamedSharding) -> NamedSharding:
    """Sharding that holds whole arrays on each device of the mesh."""
    return NamedSharding(sharding.mesh, PartitionSpec())


def placed(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Places arrays (rows, ...) of this process as a part of those of all processes."""
    return jax.tree.map(lambda array: jax.make_array_from_process_local_data(sharding, np.asarray(array)), tree)


def copied(tree: PyTree, sharding: NamedSharding) -> PyTree:
    """Copies arrays to all devices."""
    return placed(tree, everywhere(sharding))


def mapped(
    function: Callable[..., PyTree], sharding: NamedSharding, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Maps `function` over each device's part of its arguments. Results of whole arguments are the same everywhere."""
    specs = {"mesh": sharding.mesh, "in_specs": in_specs, "out_specs": out_specs}
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, check_vma=False, **specs)
    from jax.experimental.shard_map import shard_map  # before jax 0.6

    return shard_map(function, check_rep=False, **specs)


def varying(x: PyTree, *others: PyTree) -> PyTree:
    """Returns x as what varies along all axes of a `jax.shard_map` along which `others` vary: a loop has to begin with
    the type that it ends with."""
    if not hasattr(jax.lax, "pcast"):  # before jax 0.8 there is no name for it
        return x

    def axes(leaf: Any) -> frozenset[str]:
        of = jax.typeof(leaf)
        kind = getattr(of, "manual_axis_type", None)  # from jax 0.10 on
        return getattr(of, "vma", frozenset()) if kind is None else kind.varying

    wanted = frozenset().union(*map(axes, jax.tree.leaves(others)))

    def cast(leaf: Any) -> Any:
        missing = tuple(wanted - axes(leaf))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x)


def fetched(x: Array | np.ndarray) -> np.ndarray:
    """Fetches the numbers of an array, those of other processes too; all processes have to ask for them."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental.multihost_utils import process_allgather

        return process_allgather(x, tiled=True)
    return np.asarray(x)
