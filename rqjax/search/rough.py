"""Scores that are nearly right and quickly made of the same codes, to find the rows that are worth exact ones.

Levels of b bits are a sum of Walsh functions of an index's bits, which are products of +-1. The product of a query with
such a function is a count of shared bits. One side is the exclusive or of some planes of the codes, the other a plane
of the query's whole numbers. A CPU does 512 bits of each at a time. (Codes of one bit: Gao and Long, 2024,
arXiv:2405.12497.)
"""

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from rqjax import codebooks
from rqjax.arrays import packing
from rqjax.core import Codes, Quantizer, platforms, pytree
from rqjax.quantizers.scalar import Scalar
from rqjax.scoring import integers

FEW = 8
"""Most queries that are counted, one by one; more meet levels in products."""
QUERY_BITS = 6
"""Bits of a query's coordinates: they err by 0.03 of their deviation, where those of codes of 4 bits err by 0.1."""
DROPPED = 1e-3
"""Share of the levels' energy: Walsh functions that have less together are left out."""


class Query(NamedTuple):
    """A query in whole numbers, two's complements: planes of its bits in the places of the codes', the lowest first."""

    planes: list[list[UInt32[Array, "b h r 1"]]]
    unit: Float[Array, "b h r 1"]
    total: Float[Array, "b h r 1"]
    """Sum of the query's whole numbers."""


@pytree
class Planes(Scalar):
    """A `Scalar` quantizer whose products are counted."""

    def prepare(self, y: Float[Array, "b h r d"]) -> Query:
        unit = jnp.abs(y).max(-1, keepdims=True) / (2 ** (QUERY_BITS - 1) - 1)
        whole = jnp.round(y / jnp.where(unit > 0, unit, 1)).astype(jnp.int32)
        bits, dim = self.bits, self.dim
        planes = [bit_planes(packing.pack((whole >> i) & 1, bits), bits, dim)[0] for i in range(QUERY_BITS)]
        total = whole.sum(-1, keepdims=True).astype(jnp.float32)
        return Query([[word[..., None] for word in plane] for plane in planes], unit, total)

    def scores(self, prepared: Query, codes: UInt32[Array, "b h t words"]) -> Float[Array, "b h r t"]:
        chosen = functions(self.bits)
        planes = bit_planes(codes, self.bits, self.dim)
        of_levels = jnp.asarray(_weights(chosen, self.bits), jnp.float32)
        weights = jnp.matmul(of_levels, jnp.asarray(self.levels, jnp.float32), precision=lax.Precision.HIGHEST)
        total = jnp.float32(0)
        for weight, subset in zip(weights, chosen, strict=True):
            words = [functools.reduce(operator.xor, parts)[:, :, None] for parts in zip(*(planes[k] for k in subset))]  # noqa: B905
            *low, sign = [_count(words, plane) << i for i, plane in enumerate(prepared.planes)]
            product = functools.reduce(operator.add, low) - sign
            total = total + weight * (2 * product.astype(jnp.float32) - prepared.total)
        return total * prepared.unit * self.step


class Products(NamedTuple):
    """Functions that multiply queries with codes."""

    prepare: Callable[[Float[Array, "1 1 m d"]], Any]
    scores: Callable[[Any, Codes], Float[Array, "1 1 m n"]]
    """Products of prepared queries and codes (1, 1, n)."""
    spare: float = 1.0
    """Factor of how many rows to choose by these scores, over those that are wanted."""


def counted(quantizer: Quantizer, queries: int) -> bool:
    """Returns whether products of so many queries are counted."""
    return queries <= FEW and platforms.on_cpu() and any(map(_counted, jax.tree.leaves(quantizer, is_leaf=_counted)))


def exact(quantizer: Quantizer) -> Products:
    """The products of the quantizer itself."""
    return Products(quantizer.prepare, quantizer.scores)


def rough(quantizer: Quantizer, queries: int) -> Products:
    """Products like `exact`, with scores that are nearly right where these are faster for so many queries.

    Many queries are rounded to bfloat16, which holds levels in int8 as they are: scores err by a 500th of their
    deviation.
    """
    if counted(quantizer, queries):
        planes = jax.tree.map(
            lambda q: Planes(q.levels, q.step, dim=q.dim, symmetric=q.symmetric) if _counted(q) else q,
            quantizer,
            is_leaf=_counted,
        )
        return exact(planes)._replace(spare=2.0)
    products = exact(quantizer)
    if platforms.on_cpu() and integers.in_floats(queries) and quantizer.in_integers:
        # One number a query is of all its products, and large ones differ in what bfloat16 rounds away.
        low = lambda a: a if a.shape[-1] == 1 else a.astype(jnp.bfloat16)  # noqa: E731
        prepare = lambda y: jax.tree.map(low, products.prepare(y))  # noqa: E731
        return products._replace(prepare=prepare, spare=1.25)
    return products


def _counted(quantizer: object) -> bool:
    return isinstance(quantizer, Scalar) and quantizer.symmetric and quantizer.bits <= 4


@functools.cache
def functions(bits: int) -> list[tuple[int, ...]]:
    """Bits that each Walsh function multiplies: odd numbers of bits, as symmetric levels are odd."""
    odd = [s for size in range(1, bits + 1, 2) for s in itertools.combinations(range(bits), size)]
    energy = np.matmul(_weights(odd, bits), codebooks.gaussian(bits)) ** 2
    least_first = np.argsort(energy)
    kept = least_first[np.cumsum(energy[least_first]) >= DROPPED * energy.sum()]
    return [odd[i] for i in sorted(kept)]


def _weights(subsets: list[tuple[int, ...]], bits: int) -> np.ndarray:
    """Matrix (functions, 2**bits) that makes weights of levels."""
    signs = 2 * (np.arange(2**bits)[:, None] >> np.arange(bits) & 1) - 1
    return np.stack([signs[:, list(s)].prod(1) for s in subsets]) / 2**bits


def _count(words: list[Array], others: list[Array]) -> Array:
    shared = [lax.population_count(a & b).astype(jnp.int32) for a, b in zip(words, others, strict=True)]
    return functools.reduce(operator.add, shared)


def bit_planes(codes: UInt32[Array, "*n words"], bits: int, dim: int) -> list[list[UInt32[Array, "*n"]]]:
    """Words of the lowest bits of all indices of `packing.pack`, of the second ones and so on, 1 to 4 bits."""
    columns = [codes[..., i] for i in range(codes.shape[-1])]
    if bits == 3:  # a word is a lane of three bytes, and a byte of one of the lanes that are left
        left = -(-dim // 8) - len(columns)
        bytes_left = [[column >> 24 for column in columns[i * left : (i + 1) * left]] for i in range(3)]
        rest = [low | (middle << 8) | (high << 16) for low, middle, high in zip(*bytes_left, strict=True)]
        columns = [column & 0xFFFFFF for column in columns] + rest
    mask = np.uint32(sum(1 << i for i in range(0, 32, bits)))
    groups = [columns[i : i + bits] for i in range(0, len(columns), bits)]

    def word(group: list[Array], k: int) -> Array:
        return functools.reduce(operator.or_, (((w >> k) & mask) << i for i, w in enumerate(group)))

    return [[word(group, k) for group in groups] for k in range(bits)]
