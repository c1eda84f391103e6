"""The codes that score best against queries: one block of codes after the other, with a running top-k."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from rqjax.arrays.blocks import in_blocks
from rqjax.core import Codes, Quantizer
from rqjax.scoring import rules

QUERIES_TOGETHER = 1024
"""That scan the codes together; fewer than twice as many do, too."""
BLOCK_SCORES, BLOCK_COORDINATES = 2**22, 2**21
"""Of a block of codes, at most: 16 MiB of scores, 2 MiB of levels in int8."""
TOP_K_GROUP = 16
"""Group size of the two-stage top-k: groups are ranked by their maximum first."""


def scan(
    quantizer: Quantizer, codes: Codes, bias: Float[Array, "n"], y: Float[Array, "m d"], k: int
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    """The k largest of <y, x~> + bias over the vectors x~ behind the codes, the largest first, and their rows.

    Of equal scores the first row's is the larger one.

    Args:
      quantizer: of the codes.
      codes: arrays (n, ...).
      bias: of each row; -inf of one that is not to be found.
      y: queries.
      k: how many, at most n.
    """
    return in_blocks(lambda y: _scan(quantizer, codes, bias, y, k), y, rows=QUERIES_TOGETHER)


def _scan(
    quantizer: Quantizer, codes: Codes, bias: Float[Array, "n"], y: Float[Array, "m d"], k: int
) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    rows = len(bias)
    size = max(k, min(BLOCK_SCORES // max(1, len(y)), BLOCK_COORDINATES // quantizer.dim))
    size = min(rows, -(-size // TOP_K_GROUP) * TOP_K_GROUP)
    prepared = rules.prepare(quantizer, y[None, None])

    def block(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        start = jnp.minimum(i * size, rows - size)  # the last block overlaps the one before

        def part(array: Shaped[Array, "n ..."]) -> Shaped[Array, "size ..."]:
            return lax.dynamic_slice_in_dim(array, start, size)

        row = (start + jnp.arange(size)).astype(jnp.int32)
        scores = rules.scores(quantizer, prepared, jax.tree.map(lambda a: part(a)[None, None], codes))[0, 0]
        scores = scores + jnp.where(row >= i * size, part(bias), -jnp.inf)
        best, place = top_k(scores, k)
        scores, row = jnp.concatenate([found[0], best], 1), jnp.concatenate([found[1], row[place]], 1)
        return largest(scores, k, row)

    start = jnp.full((len(y), k), -jnp.inf), jnp.zeros((len(y), k), jnp.int32)
    return lax.fori_loop(0, -(-rows // size), block, start)


def top_k(scores: Float[Array, "m n"], k: int) -> tuple[Float[Array, "m k"], Int32[Array, "m k"]]:
    """`jax.lax.top_k`. A small k is looked for in the k groups with the largest maxima: on a CPU in half the time."""
    count, size = scores.shape
    if k > TOP_K_GROUP or size % TOP_K_GROUP or size < k * TOP_K_GROUP or count * size < BLOCK_SCORES // 8:
        best, place = lax.top_k(scores, k)
        return best, place
    groups = scores.reshape(count, size // TOP_K_GROUP, TOP_K_GROUP)
    chosen = jnp.sort(lax.top_k(groups.max(axis=2), k)[1], axis=1)  # in order, so that the first of equals comes first
    best, place = lax.top_k(jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(count, k * TOP_K_GROUP), k)
    return best, jnp.take_along_axis(chosen, place // TOP_K_GROUP, axis=1) * TOP_K_GROUP + place % TOP_K_GROUP


def largest(scores: Float[Array, "m n"], k: int, *others: Shaped[Array, "m n"]) -> Any:
    """The k largest scores, and what other arrays have in their places."""
    best, place = lax.top_k(scores, k)
    return best, *(jnp.take_along_axis(other, place, axis=1) for other in others)
