"""Search of the lists nearest to each query."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, PyTree

from rqjax.arrays import blocks
from rqjax.arrays.planes import materialized, part, pick
from rqjax.search.centers import Cells
from rqjax.search.rough import counted, rough
from rqjax.search.rows import Rows
from rqjax.search.scan import QUERIES_TOGETHER, largest, ranked_together
from rqjax.search.together import by_lists_together, dealt, queries_together

LEAST_ROWS, MOST_ROWS = 64, 1024
"""Fewest and most rows of a list that are scored together."""
QUERIES_OF_A_LIST = 16
"""Most queries of a list that are scored together."""
MOST_COUNTED = 4096
"""Rows of a query's lists that are counted together."""
GROUP = 8
"""Rows of a group of these, which is ranked by the best of their scores."""
RANKED_TOGETHER = 64
"""Queries whose best rows are scored exactly together, at most."""


def probe(
    cells: Cells,
    rows: Rows,
    starts: Int32[Array, "bounds"],
    y: Float[Array, "m d"],
    k: int,
    probes: int,
    metric: str,
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    """The k largest of <y, x~> + `Rows.bias`, and their rows, over the vectors x~ of the `probes` lists whose centroids
    are nearest to y. Missing ones have -inf.

    Args:
      cells: quantizer of the codes.
      rows: with inner codes, list after list.
      starts: the first row of each list, and the row after the last list.
      y: queries.
      k: how many.
      probes: at most as many as there are lists.
      metric: metric as in `Index.build`.
    """
    closeness = -jnp.sum(cells.centroids**2, axis=1) / 2 if metric == "l2" else jnp.zeros(len(cells.centroids))
    together = queries_together(cells, len(rows.ids), len(y), k, probes)
    way = by_lists_together if together else _by_query if counted(cells.inner, 1) else _by_list

    def some(y: Array) -> tuple[Array, Array]:
        near = blocks.inner(y, cells.centroids)
        chosen = lax.top_k(near + closeness, probes)[1]
        return way(cells, rows, starts, y, k, near if cells.residual else jnp.zeros_like(near), chosen)

    return blocks.in_blocks(some, y, rows=min(together or QUERIES_TOGETHER, QUERIES_TOGETHER))


def _by_query(
    cells: Cells, rows: Rows, starts: Array, y: Array, k: int, near: Array, chosen: Array
) -> tuple[Array, Array]:
    """Searches query by query: the rows of all its lists side by side, first by scores that are nearly right, then by
    exact ones."""
    count, lengths = len(rows.ids), jnp.diff(starts)
    expected = chosen.shape[1] * (count // len(lengths) + 1)
    size = max(LEAST_ROWS, min(MOST_COUNTED, 2 ** (expected - 1).bit_length()))
    first = rough(cells.inner, 1)
    wanted = math.ceil(first.spare * k)
    none = jnp.full(wanted, -jnp.inf), jnp.zeros(wanted, jnp.int32), jnp.full(wanted, -jnp.inf)

    def best(query: tuple[Any, Array, Array]) -> tuple[Array, Array, Array]:
        prepared, near, chosen = query
        ends = jnp.cumsum(lengths[chosen])

        def some(i: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            place = i * size + jnp.arange(size, dtype=jnp.int32)
            which = jnp.minimum(jnp.searchsorted(ends, place, side="right", method="compare_all"), len(ends) - 1)
            of = chosen[which]
            row = materialized(jnp.clip(starts[of + 1] - ends[which] + place, 0, count - 1))
            here = jax.tree.map(lambda a: pick(a, row), rows)
            added = jnp.where(place < ends[-1], cells.shared(near[of], here.codes) + here.bias, -jnp.inf)
            codes = jax.tree.map(lambda a: materialized(a)[None, None], cells.own(here.codes))
            scores = materialized(cells.gain * first.scores(prepared, codes)[0, 0, 0] + added)
            new = [a.reshape(GROUP, -1) for a in (scores, row, added)]
            groups = lax.top_k(new[0].max(axis=0), min(wanted, size // GROUP))[1]
            both = [jnp.concatenate([a, b[:, groups].reshape(-1)]) for a, b in zip(found, new, strict=True)]
            return largest(both[0], wanted, *both[1:])

        return lax.fori_loop(0, -(-ends[-1] // size), some, none)

    def ranked(y: Array, row: Array, added: Array) -> tuple[Array, Array]:
        codes = jax.tree.map(lambda a: pick(a, row)[:, None], cells.own(rows.codes))
        scores = cells.gain * cells.inner.scores(cells.inner.prepare(y[:, None, None]), codes)[:, 0, 0]
        return largest(scores + added, k, row)

    _, row, added = lax.map(best, (jax.vmap(first.prepare)(y[:, None, None, None]), near, chosen))
    return blocks.in_blocks(ranked, y, row, added, rows=ranked_together(RANKED_TOGETHER, wanted, cells.dim))


def _by_list(
    cells: Cells, rows: Rows, starts: Array, y: Array, k: int, near: Array, chosen: Array
) -> tuple[Array, Array]:
    """Searches list by list: each is unpacked once for some queries that look into it."""
    count, lists, probes = len(rows.ids), near.shape[1], chosen.shape[1]
    together = min(QUERIES_OF_A_LIST, 2 ** (chosen.size // lists).bit_length())
    size = min(count, max(LEAST_ROWS, min(MOST_ROWS, 2 ** (count // lists - 1).bit_length())))
    lengths = jnp.diff(starts)
    order, groups, members = dealt(chosen, lengths, together)
    each = jax.vmap(cells.inner.prepare)(y[:, None, None, None]) if together == 1 else None

    def group(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        of, place, own = members(i)
        query = jnp.where(own, order[jnp.maximum(place, 0)] // probes, len(y))
        # Only quantizers know the layout of several prepared queries: these are prepared anew for each list.
        prepared = cells.inner.prepare(y[query][None, None]) if each is None else _at(each, query[0])
        base = near[query, of][:, None]

        def scored(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            wanted = starts[of] + j * size
            start = jnp.minimum(wanted, count - size)
            here = jax.tree.map(lambda a: part(a, start, size), rows)
            row = (start + jnp.arange(size)).astype(jnp.int32)
            inside = (row >= wanted) & (row < starts[of + 1])
            codes = jax.tree.map(lambda a: a[None, None], cells.own(here.codes))
            scores = cells.gain * cells.inner.scores(prepared, codes)[0, 0] + cells.shared(base, here.codes)
            scores = scores + jnp.where(inside, here.bias, -jnp.inf)
            one, place = lax.top_k(scores, min(k, size))
            scores, row = jnp.concatenate([best[0], one], 1), jnp.concatenate([best[1], row[place]], 1)
            return largest(scores, k, row)

        best = lax.fori_loop(0, -(-lengths[of] // size), scored, _at(found, query))
        return jax.tree.map(lambda a, new: a.at[query].set(new, mode="drop"), found, best)

    start = jnp.full((len(y), k), -jnp.inf), jnp.zeros((len(y), k), jnp.int32)
    return lax.fori_loop(0, groups[-1], group, start)


def _at(tree: PyTree, place: Array) -> PyTree:
    return jax.tree.map(lambda a: a[place], tree)
