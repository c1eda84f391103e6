"""Product quantizers as recipes that learn from data: `FITTED[name](key, x, bits)`.

Codes take d b bits and there is no norm; codebooks and rotations belong to the quantizer. `x` is as in `learned`.
"""

from collections.abc import Callable

import jax
from jax import lax
from jaxtyping import Array

from rqjax.core import Key, Quantizer, check_int, random
from rqjax.quantizers.combinators import Residual
from rqjax.quantizers.exchange import Exchange, exchange
from rqjax.quantizers.per_head import stack_heads
from rqjax.quantizers.product import Product
from rqjax.recipes.fitted import fitted
from rqjax.recipes.opq import fit_lopq, fit_opq

INDEX_BITS = 8
"""Most bits of the index of a group of coordinates."""
EXCHANGE_LEVELS = 2
"""Levels of exchange in `qet`: their maps cost a bit for each coordinate."""


@fitted
def pq(key: Key, x: Array, bits: int) -> Quantizer:
    """Product quantization (Jégou, Douze & Schmid, 2011)."""
    return _each_head(lambda key, x: Product.fit(key, x, *_group(x.shape[1], bits)), key, x, bits)


@fitted
def opq(key: Key, x: Array, bits: int) -> Quantizer:
    """Product quantization after a fitted rotation (Ge et al., 2013)."""
    return _each_head(lambda key, x: fit_opq(key, x, *_group(x.shape[1], bits)), key, x, bits)


@fitted
def lopq(key: Key, x: Array, bits: int) -> Quantizer:
    """`opq` for each of two cells (Kalantidis & Avrithis, 2014), at the cost of 8 bits a vector."""
    return _each_head(lambda key, x: fit_lopq(key, x, *_group(x.shape[1], bits)), key, x, bits)


@fitted
def qet(key: Key, x: Array, bits: int) -> Quantizer:
    """Element exchange, a product quantizer, and above 2 bits another one for the residual (QET). Maps take a bit; the
    quantizers share the rest in halves, the larger one first. One bit is `pq`'s."""

    def one(key: Key, x: Array) -> Quantizer:
        first, second = random.split(key)
        rates = bits // 2, (bits - 1) // 2
        y, _ = exchange(x, EXCHANGE_LEVELS)
        early = Product.fit(first, y, *_group(x.shape[1] >> EXCHANGE_LEVELS, rates[0]))
        if not rates[1]:
            return Exchange(early, levels=EXCHANGE_LEVELS)
        late = Product.fit(second, y - early.decode(early.encode(y)), *_group(x.shape[1], rates[1]))
        return Exchange(Residual(early, late), levels=EXCHANGE_LEVELS)

    return pq(key, x, bits) if bits == 1 else _each_head(one, key, x, bits)


def _group(dim: int, bits: int) -> tuple[int, int]:
    """Coordinates in a group, and centroids."""
    width = max(w for w in range(1, INDEX_BITS // bits + 1) if dim % w == 0)
    return width, 2 ** (width * bits)


def _each_head(make: Callable[[Array, Array], Quantizer], key: Key, x: Array, bits: int) -> Quantizer:
    check_int("bits", bits, 1, INDEX_BITS)
    x, unstack = stack_heads(x)
    keys = random.split(key, len(x))
    return unstack(jax.jit(lambda pairs: lax.map(lambda pair: make(*pair), pairs))((keys, x)))
