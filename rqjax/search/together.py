"""Search of lists that many queries look into: each list's codes are read once for all of its queries."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from rqjax.arrays import blocks
from rqjax.arrays.planes import materialized, part, pick
from rqjax.core import platforms
from rqjax.core.products import all_in_floats
from rqjax.search.centers import Cells
from rqjax.search.rows import Rows
from rqjax.search.scan import largest

GROUP = 8
"""Rows that are ranked by the best of their scores."""
LEAST, MOST = 8, 64
"""Least queries of a list, in the mean, for which lists are read together, and most that meet it in one product."""
LEAST_ROWS, MOST_ROWS = 64, 256
"""Fewest and most rows of a list that are scored together."""
MAXIMA = 2**23
"""Best scores of groups that are in memory at a time."""
MOST_FOUND = 128
"""Most vectors of a query that are found so: their groups are scored row by row."""
RANKED = 16
"""Queries whose best rows are scored exactly together."""
SPARE = 1.25
"""Factor of how many groups are chosen, over the rows that are wanted."""


def _sizes(count: int, lists: int) -> tuple[int, int]:
    """Rows that are scored together, and how many of such a part of each list are looked into in one round."""
    size = max(LEAST_ROWS, min(MOST_ROWS, 2 ** max(0, count // lists - 1).bit_length()))
    return size, max(2, -(-2 * count // (lists * size)))


def queries_together(cells: Cells, count: int, m: int, k: int, probes: int) -> int:
    """Queries for which lists are read together; 0 if that does not pay."""
    lists = len(cells.centroids)
    size, chunks = _sizes(count, lists)
    m = min(m, MAXIMA // (probes * size * chunks // GROUP))
    fits = platforms.on_cpu() and cells.inner.in_integers and count >= size and k <= MOST_FOUND
    return m if fits and m * probes >= LEAST * lists else 0


def dealt(
    chosen: Int[Array, "m probes"], lengths: Int[Array, "lists"], together: int
) -> tuple[Int[Array, "pairs"], Int[Array, "lists"], Callable[[Array], tuple[Array, Array, Array]]]:
    """Deals pairs of a query and a list that it looks into to groups of one list each.

    Returns the pairs in the order of their lists, the number of groups up to each list's last, and a function of a
    group. It returns its list, the places of `together` pairs in that order, and which of them are of this list.
    """
    lists = len(lengths)
    asked = jnp.where(lengths[chosen] > 0, chosen, lists).reshape(-1)  # no one looks into an empty list
    order = jnp.argsort(asked)
    firsts = jnp.searchsorted(asked[order], jnp.arange(lists + 1))  # of the pairs of a list
    groups = jnp.cumsum(-(-jnp.diff(firsts) // together))

    def members(i: Array) -> tuple[Array, Array, Array]:
        of = jnp.searchsorted(groups, i, side="right")
        place = firsts[of + 1] - together * (groups[of] - i)  # groups of a list are full but for the first
        place = place + jnp.arange(together, dtype=jnp.int32)
        return of, place, place >= firsts[of]

    return order, groups, members


def by_lists_together(
    cells: Cells, rows: Rows, starts: Array, y: Array, k: int, near: Array, chosen: Array
) -> tuple[Array, Array]:
    """Scores all rows of a list with all queries that look into it. Keeps the best score of each group of rows, and
    scores the rows of the best groups exactly. Rounds take one part after another of lists that are long."""
    (m, probes), lists, count = chosen.shape, len(cells.centroids), len(rows.ids)
    size, chunks = _sizes(count, lists)
    slots, in_round = size // GROUP, size * chunks
    together = min(MOST, 2 ** max(0, m * probes // lists - 1).bit_length())
    wanted = math.ceil(SPARE * k)
    lengths = jnp.diff(starts)
    order, groups, members = dealt(chosen, lengths, together)
    place_of = jnp.argsort(order).reshape(m, probes)

    def prepare(y: Array) -> Any:
        with all_in_floats():
            made = cells.inner.prepare(y[None, None])
        return jax.tree.map(lambda a: a if a.shape[-1] == 1 else a.astype(jnp.bfloat16), made)

    every = prepare(y)
    by_row = all(a.shape[:3] == (1, 1, m) for a in jax.tree.leaves(every))  # else only the quantizer knows the layout

    def begin(of: Array, chunk: Array) -> tuple[Array, Array]:
        """Row where a part of a list begins, and where it is read from: the last one of all overlaps."""
        row = starts[of] + chunk * size
        return row, jnp.minimum(row, count - size)

    def group(turn: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, (round_, maxima) = groups[-1] - 1 - turn, state  # from the last, whose overlap is then overwritten
        of, place, own = members(i)
        query = order[jnp.maximum(place, 0)] // probes
        prepared = jax.tree.map(lambda a: a[:, :, query], every) if by_row else prepare(y[query])
        base = near[query, of][:, None]

        def scored(j: Array, maxima: Array) -> Array:
            first, start = begin(of, round_ * chunks + j)
            here = jax.tree.map(lambda a: part(a, start, size), rows)
            row = start + jnp.arange(size, dtype=jnp.int32)
            inside = (row >= first) & (row < starts[of + 1])
            codes = jax.tree.map(lambda a: a[None, None], cells.own(here.codes))
            product = cells.gain * cells.inner.scores(prepared, codes)[0, 0] + cells.shared(base, here.codes)
            scores = materialized(product + jnp.where(inside, here.bias, -jnp.inf))
            best = jnp.where(own[:, None], scores.reshape(together, slots, GROUP).max(axis=2), -jnp.inf)
            return lax.dynamic_update_slice(maxima, best.astype(jnp.float32), (place[0] + together, j * slots))

        left = jnp.clip(-(-(lengths[of] - round_ * in_round) // size), 0, chunks)
        return round_, lax.fori_loop(0, left, scored, maxima)

    def some(round_: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maxima = jnp.full((m * probes + 2 * together, slots * chunks), -jnp.inf, jnp.float32)
        _, maxima = lax.fori_loop(0, groups[-1], group, (round_, maxima))
        maxima = maxima[place_of + together].reshape(m, -1)
        best, at = lax.top_k(maxima, min(wanted, maxima.shape[1]))
        of = jnp.take_along_axis(chosen, at // (slots * chunks), axis=1)
        chunk = round_ * chunks + at % (slots * chunks) // slots
        both = (best, chunk * slots + at % slots, of)
        joined = [jnp.concatenate([a, b], axis=1) for a, b in zip(found, both, strict=True)]
        return largest(joined[0], wanted, *joined[1:])

    def ranked(y: Array, near: Array, best: Array, at: Array, of: Array) -> tuple[Array, Array]:
        first, start = begin(of, at // slots)
        row = (start + at % slots * GROUP)[..., None] + jnp.arange(GROUP, dtype=jnp.int32)
        ends = starts[of + 1]
        inside = (best > -jnp.inf)[..., None] & (row >= first[..., None]) & (row < ends[..., None])
        row, inside = (a.reshape(len(y), -1) for a in (jnp.clip(row, 0, count - 1), inside))
        here = jax.tree.map(lambda a: pick(a, row.reshape(-1)), rows)
        codes = jax.tree.map(lambda a: a.reshape(len(y), 1, -1, *a.shape[1:]), cells.own(here.codes))
        scores = cells.gain * cells.inner.scores(cells.inner.prepare(y[:, None, None]), codes)[:, 0, 0]
        base = jnp.repeat(jnp.take_along_axis(near, of, axis=1), GROUP, axis=1).reshape(-1)
        added = (cells.shared(base, here.codes) + here.bias).reshape(row.shape)
        return largest(scores + jnp.where(inside, added, -jnp.inf), k, row)

    none = jnp.full((m, wanted), -jnp.inf, jnp.float32), *(jnp.zeros((m, wanted), jnp.int32) for _ in range(2))
    best = lax.fori_loop(0, -(-lengths.max() // in_round), some, none)
    return blocks.in_blocks(ranked, y, near, *best, rows=RANKED)
