"""Products with codes, for every recipe and for a leaf that rqjax does not know."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import FITTED, METHODS
from rqjax.scoring.integers import MANY_ROWS
from tests.tools.plain import PlainCache, error
from tests.tools.steps import Steps

DIM, KEY = 32, jax.random.key(0)
LOUD = np.exp(-np.arange(DIM) / 8)
"""A spectrum for recipes that learn from data."""
DECODED = {"pq", "opq", "lopq", "qet"}
"""Recipes whose products are not taken in integers: `Rule` says why."""
SCALED = {
    "klt_trellis",
    "klt_joint",
    "rotorquant_learned",
    "rotor_chain_learned",
    "rotorquant_allocated",
    "rotorquant_allocated_trellis",
}
"""Recipes with scales of each coordinate's own."""

SLOW = {"rotorquant_allocated", "rotorquant_learned"}
"""Recipes that train, made of parts of others here."""


def vectors(seed, *shape):
    return np.random.default_rng(seed).standard_normal((*shape, DIM)).astype(np.float32)


@functools.cache
def made(name):
    return METHODS[name](KEY, DIM, 3) if name in METHODS else FITTED[name](KEY, jnp.asarray(LOUD * vectors(0, 600)), 3)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        *("turboquant_prod", "rotorquant_paper", "planarquant", "eden_unbiased", "turboquant_trellis", "nested_e8"),
        *("affine_rotated_sign", "klt_joint", "rotorquant_allocated_trellis", "oscar", "lopq", "qet"),
    ],
)
def test_a_cache_and_an_index_have_the_products_of_decoded_vectors(name):
    """Products with codes of 64 of 80 tokens, and of 300 vectors, are right to 1e-4 of all products, the 15 bits of a
    query.

    If scales of coordinates are multiplied into it, the 15 bits are those of the largest product, and others have
    fewer: 2e-4.
    """
    quantizer, least = made(name), 2e-4 if name in SCALED else 1e-4
    assert quantizer.in_integers == (name not in DECODED)
    cache = rqjax.KVCache.init(2, 2, 80, quantizer, quantizer, window=0, sinks=0, dtype=jnp.float32)
    k, v, q = vectors(1, 2, 80, 2), vectors(2, 2, 80, 2), vectors(3, 2, 3, 4)
    plain = PlainCache(cache)
    plain.append(k, v)
    cache = rqjax.append(cache, k, v)
    assert cache.coded.tolist() == [80, 80]
    assert error(rqjax.attend(cache, q), plain.attend(q)) < least

    x = vectors(4, 300)
    index, decoded = rqjax.Index.build(quantizer, x), np.asarray(quantizer.decode(quantizer.encode(x)), np.float64)
    for y in vectors(5, 7), vectors(5, MANY_ROWS):
        scores, ids = index.search(y, 300)
        assert error(scores, np.take_along_axis(y @ decoded.T, np.asarray(ids), axis=1)) < least


@pytest.mark.full
def test_a_new_leaf_takes_one_rule(tmp_path):
    """A new leaf is laid out in tiles, multiplied in integers in a cache and an index, saved, loaded and trained."""
    steps = Steps(jnp.float32(1 / 8), DIM)
    nest = rqjax.Rotated(rqjax.rotations.Hadamard.random(KEY, DIM), steps)
    assert nest.in_integers
    cache = rqjax.KVCache.init(1, 2, 80, nest, steps, window=0, sinks=0, dtype=jnp.float32)
    plain, k, v, q = PlainCache(cache), vectors(1, 1, 80, 2), vectors(2, 1, 80, 2), vectors(3, 1, 3, 4)
    plain.append(k, v)
    cache = rqjax.append(cache, k, v)
    assert {leaf.dtype for leaf in jax.tree.leaves((cache.keys, cache.values))} == {
        jnp.dtype("uint8"),
        jnp.dtype("float32"),
    }
    assert rqjax.nbytes(cache.keys) == 128 * 2 * (DIM // 2 + 4)
    assert error(rqjax.attend(cache, q), plain.attend(q)) < 1e-4

    index = rqjax.Index.build(nest, vectors(4, 300))
    scores, ids = index.search(vectors(5, 7), 300)
    decoded = np.asarray(nest.decode(nest.encode(vectors(4, 300))), np.float64)
    assert error(scores, np.take_along_axis(vectors(5, 7) @ decoded.T, np.asarray(ids), axis=1)) < 1e-4
    for part in (nest, cache, index):
        rqjax.save(part, tmp_path / "part.safetensors")
        again = rqjax.load(tmp_path / "part.safetensors")
        assert jax.tree.structure(again) == jax.tree.structure(part)
        jax.tree.map(np.testing.assert_array_equal, again, part)

    x = jnp.asarray(vectors(6, 600))
    trained, history = rqjax.fit(
        rqjax.Rotated(nest.rotation, Steps(jnp.float32(1 / 4), DIM)), x, KEY, where=lambda q: q.inner.step, steps=60
    )
    assert history["validation"].min() < 0.8 * history["validation"][0]
    assert 0.1 < float(trained.inner.step) < 0.2
