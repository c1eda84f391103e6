"""Searches that are prepared once for many calls."""

from collections.abc import Callable
from typing import Any

import jax

from rqjax.search import ids, ranking


def searcher(index: Any, **options: Any) -> Callable[[Any], Any]:
    """Compiles `index.search` with these options: arrays are passed flat, which jax does without Python."""
    leaves, tree, wide = *jax.tree.flatten(index), ids.wide(index.rows.ids)
    run = jax.jit(lambda leaves, y: jax.tree.unflatten(tree, leaves).search(y, **options))

    def find(queries: Any) -> Any:
        scores, found = run(leaves, ranking.check_numbers(index, queries))
        return scores, ids.returned(found, wide=wide)

    return find
