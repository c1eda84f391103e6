"""Scan of the codes that score best: groups of rows by their best scores, block after block, then the rows."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from rqjax.arrays.blocks import in_blocks
from rqjax.arrays.planes import materialized, part, pick
from rqjax.core import Codes, Quantizer, platforms
from rqjax.search.rough import counted, exact, rough

QUERIES_TOGETHER = 1024
"""Queries that scan the codes together; fewer than twice as many do, too."""
GROUP = 32
"""Rows that are ranked by the best of their scores, at most: the top-k of all scores takes longer than to make them."""


class Block(NamedTuple):
    """Limits of what is done at once."""

    scores: int
    """Scores of a block of codes, of all queries."""
    coordinates: int
    """Coordinates of a block of codes, a byte each in int8."""
    ranked: int
    """Queries whose best groups are scored row by row together, at most."""
    gathered: int
    """Coordinates of the rows that are gathered for them."""


IN_CACHE, IN_MEMORY = Block(2**20, 2**21, 16, 2**22), Block(2**27, 2**28, 1024, 2**26)
"""Limits on a CPU, whose cache a block fits, and on a GPU, where each block is a dozen launches."""


def limits() -> Block:
    """Returns the limits for the device."""
    return IN_MEMORY if platforms.on_gpu() else IN_CACHE


def ranked_together(most: int, rows: int, dim: int) -> int:
    """Queries of which so many rows each are gathered together, `most` at most and one at least."""
    return max(1, min(most, limits().gathered // (rows * dim)))


def scan(
    quantizer: Quantizer, codes: Codes, bias: Float[Array, "n"], y: Float[Array, "m d"], k: int
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    """The k largest of <y, x~> + bias over the vectors x~ behind the codes, the largest first, and their rows.

    Rows are chosen by scores that may be only nearly right (`rough`), with some to spare; what is returned is exact. Of
    equal scores the first row's counts as the larger one.

    Args:
      quantizer: quantizer of the codes.
      codes: arrays (n, ...).
      bias: bias of each row; -inf for one that is not to be found.
      y: queries.
      k: how many, at most n.
    """
    nearly = len(bias) >= 8 * GROUP * k
    few = nearly and counted(quantizer, len(y))
    together = 1 if few else QUERIES_TOGETHER
    return in_blocks(lambda y: _scan(quantizer, codes, bias, y, k, nearly, few), y, rows=together)


def _scan(
    quantizer: Quantizer, codes: Codes, bias: Float[Array, "n"], y: Float[Array, "m d"], k: int, nearly: bool, few: bool
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    first = rough(quantizer, len(y)) if nearly else exact(quantizer)
    prepared = first.prepare(y[None, None])
    rows, wanted, group = len(bias), math.ceil(first.spare * k), GROUP
    while group > 1 and 4 * group * wanted > rows:
        group //= 2
    limit = limits()
    size = limit.scores if few else min(limit.scores // max(1, len(y)), limit.coordinates // quantizer.dim)
    size = min(-(-max(size, wanted) // group), rows // group) * group
    made = functools.partial(first.scores, prepared)
    best = _groups(made, codes, bias, len(y), min(wanted, rows // group), group, size)
    if first.spare == 1.0 and group == 1:
        return best
    last = -(-rows // size) * size - size  # where the last block begins that overlaps the one before

    def ranked(y: Array, maxima: Array, start: Array) -> tuple[Array, Array]:
        order = jnp.argsort(start, axis=1)  # so that the first of equals comes first
        maxima, start = (jnp.take_along_axis(a, order, axis=1)[:, :, None] for a in (maxima, start))
        row = start + jnp.arange(group, dtype=jnp.int32)
        seen = (maxima == -jnp.inf) | ((row < last) & (last < start + group))
        row, seen = row.reshape(len(y), -1), seen.reshape(len(y), -1)
        some = jax.tree.map(lambda a: pick(a, row)[:, None], codes)
        scores = quantizer.scores(quantizer.prepare(y[:, None, None]), some)[:, 0, 0]
        return largest(scores + jnp.where(seen, -jnp.inf, bias[row]), k, row)

    together = ranked_together(limit.ranked, best[0].shape[1] * group, quantizer.dim)
    return in_blocks(ranked, y, *best, rows=together)


def _groups(
    first: Callable[[Codes], Array], codes: Codes, bias: Float[Array, "n"], m: int, count: int, group: int, size: int
) -> tuple[Float[Array, "m count"], Int32[Array, "m count"]]:
    """The groups of the best rows, by blocks of `size`: their best scores, and their first rows."""
    rows, in_block = len(bias), size // group
    blocks = -(-rows // size)
    parts = -(-blocks * in_block // max(count, in_block, limits().scores // max(1, m)))
    together = max(-(-blocks // parts), -(-count // in_block))  # a part has groups enough
    parts = -(-blocks // together)

    def block(i: Array, j: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        start = jnp.minimum(i * size, rows - size)  # the last block overlaps the one before

        row = (start + jnp.arange(size)).astype(jnp.int32)
        scores = first(jax.tree.map(lambda a: part(a, start, size)[None, None], codes))[0, 0]
        scores = materialized(scores + jnp.where(row >= i * size, part(bias, start, size), -jnp.inf))
        made = scores.reshape(m, in_block, group).max(axis=2).astype(found[0].dtype), row[None, ::group]
        return jax.tree.map(lambda a, new: lax.dynamic_update_slice_in_dim(a, new, j * in_block, 1), found, made)

    def some(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        empty = jnp.full((m, together * in_block), -jnp.inf), jnp.zeros((1, together * in_block), jnp.int32)
        maxima, start = lax.fori_loop(0, together, lambda j, made: block(i * together + j, j, made), empty)
        best, place = lax.top_k(maxima, count)
        return largest(jnp.concatenate([found[0], best], 1), count, jnp.concatenate([found[1], start[0][place]], 1))

    none = jnp.full((m, count), -jnp.inf), jnp.zeros((m, count), jnp.int32)
    return lax.fori_loop(0, parts, some, none)


def largest(scores: Float[Array, "*m n"], k: int, *others: Shaped[Array, "..."]) -> Any:
    """The k largest scores, and what other arrays have in their places."""
    best, place = lax.top_k(scores, k)
    axis = scores.ndim - 1

    def taken(other: Array) -> Array:
        return jnp.take_along_axis(other, place if other.ndim == place.ndim else place[..., None], axis=axis)

    return best, *map(taken, others)
