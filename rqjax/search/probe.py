"""The best of the lists nearest to each query: a list is unpacked once for all queries that look into it."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from rqjax.arrays import blocks
from rqjax.core import Codes
from rqjax.scoring import rules
from rqjax.search.cells import Cells
from rqjax.search.scan import QUERIES_TOGETHER, largest

QUERIES_OF_A_LIST = 16
"""That are scored together at most."""
LEAST_ROWS, MOST_ROWS = 64, 1024
"""Of a list that are scored together."""


def probe(
    cells: Cells,
    codes: Codes,
    starts: Int32[Array, "lists+1"],
    bias: Float[Array, "n"],
    y: Float[Array, "m d"],
    k: int,
    probes: int,
    closeness: Float[Array, "lists"],
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    """The k largest of <y, x~> + bias over the vectors x~ of the `probes` lists with the largest <y, c> + closeness, c
    being a list's centroid; and their rows. What is not found has -inf.

    Args:
      cells: of the codes.
      codes: inner ones, arrays (n, ...), list after list.
      starts: the first row of each list, and the row after the last list.
      bias: of each row; -inf of one that is not to be found.
      y: queries.
      k: how many.
      probes: at most as many as there are lists.
      closeness: of each list.
    """
    return blocks.in_blocks(
        lambda y: _probe(cells, codes, starts, bias, y, k, probes, closeness), y, rows=QUERIES_TOGETHER
    )


def _probe(cells, codes, starts, bias, y, k, probes, closeness):
    rows, lists, pairs = len(bias), len(cells.centroids), len(y) * probes
    together = min(QUERIES_OF_A_LIST, 2 ** (pairs // lists).bit_length())
    size = min(rows, max(LEAST_ROWS, min(MOST_ROWS, 2 ** (rows // lists - 1).bit_length() // 2)))
    near = blocks.inner(y, cells.centroids)
    lengths = jnp.diff(starts)
    chosen = lax.top_k(near + closeness, probes)[1].reshape(-1)
    chosen = jnp.where(lengths[chosen] > 0, chosen, lists)  # no one looks into an empty list
    order = jnp.argsort(chosen)
    firsts = jnp.searchsorted(chosen[order], jnp.arange(lists + 1))  # of the pairs of a list
    groups = jnp.cumsum(-(-jnp.diff(firsts) // together))
    prepared = jax.vmap(lambda y: rules.prepare(cells.inner, y))(y[:, None, None, None])

    def group(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        of = jnp.searchsorted(groups, i, side="right")
        place = firsts[of + 1] - together * (groups[of] - i)  # groups of a list are full but for the first
        place = place + jnp.arange(together)
        query = jnp.where(place >= firsts[of], order[jnp.maximum(place, 0)] // probes, len(y))
        asked = jax.tree.map(lambda a: a[query], prepared)
        base = near[query, of][:, None] if cells.residual else 0

        def part(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            wanted = starts[of] + j * size
            start = jnp.minimum(wanted, rows - size)

            def sliced(array: Shaped[Array, "n ..."]) -> Shaped[Array, "size ..."]:
                return lax.dynamic_slice_in_dim(array, start, size)

            row = (start + jnp.arange(size)).astype(jnp.int32)
            inside = (row >= wanted) & (row < starts[of + 1])
            block = jax.tree.map(lambda a: sliced(a)[None, None], codes)
            scores = jax.vmap(lambda asked: rules.scores(cells.inner, asked, block)[0, 0, 0])(asked)
            scores = scores + base + jnp.where(inside, sliced(bias), -jnp.inf)
            one, place = lax.top_k(scores, min(k, size))
            scores, row = jnp.concatenate([best[0], one], 1), jnp.concatenate([best[1], row[place]], 1)
            return largest(scores, k, row)

        best = tuple(a[query] for a in found)
        best = lax.fori_loop(0, -(-lengths[of] // size), part, best)
        return tuple(a.at[query].set(new, mode="drop") for a, new in zip(found, best, strict=True))

    start = jnp.full((len(y), k), -jnp.inf), jnp.zeros((len(y), k), jnp.int32)
    return lax.fori_loop(0, groups[-1], group, start)
