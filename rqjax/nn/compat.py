"""Compatibility with flax 0.10, the newest for jax 0.5: modules in jitted functions, lists and values of nnx."""

from typing import Any

import jax
from flax import nnx

NEWER = hasattr(nnx, "List")


def listed(modules: list[Any]) -> Any:
    """Wraps modules as an attribute of a module."""
    return nnx.List(modules) if NEWER else modules


def value(variable: Any) -> Any:
    return variable.get_value() if NEWER else variable.value


def set_value(variable: Any, new: Any) -> None:
    if NEWER:
        variable.set_value(new)
    else:
        variable.value = new


def jittable(module: Any) -> Any:
    """Registers a class of modules, so that functions under `jax.jit` take and return them."""
    if NEWER:
        return module

    def flatten(one: Any) -> tuple[tuple[Any], Any]:
        graph, state = nnx.split(one)
        return (state,), graph

    jax.tree_util.register_pytree_node(module, flatten, lambda graph, state: nnx.merge(graph, *state))
    return module
