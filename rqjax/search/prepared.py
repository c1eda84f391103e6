"""Searches that are prepared once for many calls."""

from collections.abc import Callable
from typing import Any

import jax

from rqjax.search import ranking


def searcher(index: Any, **options: Any) -> Callable[[Any], Any]:
    """Compiles `index.search` with these options: arrays are passed flat, which jax does without Python."""
    leaves, tree = jax.tree.flatten(index)
    run = jax.jit(lambda leaves, y: jax.tree.unflatten(tree, leaves).search(y, **options))

    def find(queries: Any) -> Any:
        return run(leaves, ranking.check_numbers(queries, index.dim))

    return find
