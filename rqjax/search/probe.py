"""The best of the lists nearest to each query: a list is unpacked once for all queries that look into it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, PyTree

from rqjax.arrays import blocks
from rqjax.scoring import rules
from rqjax.search.cells import Cells
from rqjax.search.rows import Rows
from rqjax.search.scan import QUERIES_TOGETHER, largest

QUERIES_OF_A_LIST = 16
"""That are scored together at most."""
LEAST_ROWS, MOST_ROWS = 64, 1024
"""Of a list that are scored together."""


def probe(
    cells: Cells,
    rows: Rows,
    starts: Int32[Array, "bounds"],
    y: Float[Array, "m d"],
    k: int,
    probes: int,
    closeness: Float[Array, "lists"],
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    """The k largest of <y, x~> + `Rows.bias` over the vectors x~ of some lists, and their rows: of the `probes` lists
    with the largest <y, c> + closeness, c being a list's centroid. What is not found has -inf.

    Args:
      cells: of the codes.
      rows: with inner codes, list after list.
      starts: the first row of each list, and the row after the last list.
      y: queries.
      k: how many.
      probes: at most as many as there are lists.
      closeness: of each list.
    """
    return blocks.in_blocks(lambda y: _probe(cells, rows, starts, y, k, probes, closeness), y, rows=QUERIES_TOGETHER)


def _probe(
    cells: Cells, rows: Rows, starts: Array, y: Array, k: int, probes: int, closeness: Array
) -> tuple[Array, Array]:
    count, lists, pairs = len(rows.ids), len(cells.centroids), len(y) * probes
    together = min(QUERIES_OF_A_LIST, 2 ** (pairs // lists).bit_length())
    size = min(count, max(LEAST_ROWS, min(MOST_ROWS, 2 ** (count // lists - 1).bit_length())))
    near = blocks.inner(y, cells.centroids)
    lengths = jnp.diff(starts)
    chosen = lax.top_k(near + closeness, probes)[1].reshape(-1)
    chosen = jnp.where(lengths[chosen] > 0, chosen, lists)  # no one looks into an empty list
    order = jnp.argsort(chosen)
    firsts = jnp.searchsorted(chosen[order], jnp.arange(lists + 1))  # of the pairs of a list
    groups = jnp.cumsum(-(-jnp.diff(firsts) // together))
    each = jax.vmap(lambda y: rules.prepare(cells.inner, y))(y[:, None, None, None]) if together == 1 else None

    def group(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        of = jnp.searchsorted(groups, i, side="right")
        place = firsts[of + 1] - together * (groups[of] - i)  # groups of a list are full but for the first
        place = place + jnp.arange(together)
        query = jnp.where(place >= firsts[of], order[jnp.maximum(place, 0)] // probes, len(y))
        # Only rules know how what they prepare lies for several queries: these are prepared anew for each list.
        prepared = rules.prepare(cells.inner, y[query][None, None]) if each is None else _at(each, query[0])
        base = near[query, of][:, None] if cells.residual else 0

        def scored(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            wanted = starts[of] + j * size
            start = jnp.minimum(wanted, count - size)
            part = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size), rows)
            row = (start + jnp.arange(size)).astype(jnp.int32)
            inside = (row >= wanted) & (row < starts[of + 1])
            codes = jax.tree.map(lambda a: a[None, None], part.codes)
            scores = rules.scores(cells.inner, prepared, codes)[0, 0] + base + jnp.where(inside, part.bias, -jnp.inf)
            one, place = lax.top_k(scores, min(k, size))
            scores, row = jnp.concatenate([best[0], one], 1), jnp.concatenate([best[1], row[place]], 1)
            return largest(scores, k, row)

        best = lax.fori_loop(0, -(-lengths[of] // size), scored, _at(found, query))
        return jax.tree.map(lambda a, new: a.at[query].set(new, mode="drop"), found, best)

    start = jnp.full((len(y), k), -jnp.inf), jnp.zeros((len(y), k), jnp.int32)
    return lax.fori_loop(0, groups[-1], group, start)


def _at(tree: PyTree, place: Array) -> PyTree:
    return jax.tree.map(lambda a: a[place], tree)
