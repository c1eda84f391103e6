"""KVarN: scales along time and along channels, in a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.plain import PlainCache, error
from tests.tools.suites import some

pytestmark = pytest.mark.full

DIM, TILE = 64, 128


def vectors(seed, *shape, dim=DIM):
    """Some channels and some tokens are loud."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*shape, dim)) * rng.lognormal(size=dim)
    return (x * rng.lognormal(size=(*shape[:-1], shape[-1], 1))).astype(np.float32)


def hadamard(dim):
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(dim)


def published(tile, bits):
    """Returns a tile as KVarN decodes it. Sixteen rounds of normalization in logarithms keep the least uneven scales.
    Then rows are rounded to an asymmetric grid, whose scales include those of rows. Three float16 arrays are stored."""

    def uneven(y):
        return sum(y.std(axis, ddof=1).max() / max(y.std(axis, ddof=1).min(), 1e-8) for axis in (0, 1))

    column, row = np.zeros((1, tile.shape[1])), np.zeros((tile.shape[0], 1))
    best = uneven(tile), np.exp(column), np.exp(row)
    for _ in range(16):
        y = tile / np.exp(column) / np.exp(row)
        column = (column + np.log(y.std(0, ddof=1, keepdims=True).clip(1e-3, 1e3))).clip(-0.3, 10)
        y = tile / np.exp(column) / np.exp(row)
        row = (row + np.log(y.std(1, ddof=1, keepdims=True).clip(1e-3, 1e3))).clip(-0.3, 10)
        found = uneven(tile / np.exp(column) / np.exp(row))
        best = (found, np.exp(column), np.exp(row)) if found <= best[0] else best
    _, column, row = best
    y = tile / column / row
    low = y.min(1, keepdims=True)
    scale = (y.max(1, keepdims=True) - low) / (2**bits - 1)
    index = np.round((y - low) / scale)
    stored = [np.float16(part).astype(np.float64) for part in (row * scale, row * low, column)]
    return (index * stored[0] + stored[1]) * stored[2]


@pytest.mark.parametrize(("dim", "bits"), some([(128, 2), (64, 4), (64, 2), (128, 4)], [(128, 2), (64, 4)]))
def test_kvarn_is_its_formula(dim, bits):
    """Tiles of keys are channels by tokens, those of values tokens by channels; both after a Hadamard rotation. One
    coordinate in a thousand may be on the border of two levels."""
    strategy, x = rqjax.strategy(f"kvarn_{bits}", jax.random.key(0), dim), vectors(0, 2 * TILE, dim=dim)
    keys, values = (np.asarray(q.decode(q.encode(x))) for q in (strategy.keys, strategy.values))
    turn = hadamard(dim)
    tiles = (x.astype(np.float64) @ turn).reshape(2, TILE, dim)
    expected = [published(tile.T, bits).T for tile in tiles], [published(tile, bits) for tile in tiles]
    for found, tiles in zip((keys, values), expected, strict=True):
        size = np.abs(np.concatenate(tiles)).max(1, keepdims=True)
        assert np.mean(np.abs(found @ turn - np.concatenate(tiles)) < 2e-3 * size) > 0.999


def test_bits_are_bytes():
    for name, keys, values in (("kvarn_4/kvarn_2", 4.375, 2.375), ("kvarn_3", 3.375, 3.375)):
        strategy = rqjax.strategy(name, jax.random.key(0), 128)
        for quantizer, bits in ((strategy.keys, keys), (strategy.values, values)):
            codes = jax.eval_shape(quantizer.encode, jax.ShapeDtypeStruct((3, 2 * TILE, 128), jnp.float32))
            assert 8 * rqjax.nbytes(codes) == 3 * 2 * TILE * quantizer.bits_per_vector == 3 * 2 * TILE * 128 * bits


@pytest.mark.parametrize("chunks", some([((150, 150),), ((7, 128, 1, 164),)], []))
def test_a_cache_encodes_whole_tiles(chunks):
    cache = rqjax.strategy("kvarn_4/kvarn_2", jax.random.key(0), DIM).cache(
        2, 2, 512, window=16, sinks=3, dtype=jnp.float32
    )
    k, v, q = (x.swapaxes(1, 2) for x in (vectors(1, 2, 2, 300), vectors(2, 2, 2, 300), vectors(3, 2, 4, 1)))
    assert cache.unit == TILE
    plain, start = PlainCache(cache), 0
    for size in chunks:
        part = k[:, start : start + size], v[:, start : start + size]
        cache, start = rqjax.append(cache, *part), start + size
        plain.append(*part)
    assert cache.coded.tolist() == [256, 256]  # of 300 - 16 - 3 = 281
    assert error(rqjax.attend(cache, q), plain.attend(q)) < 1e-4


def test_tiles_are_saved(tmp_path):
    strategy = rqjax.strategy("kvarn_2", jax.random.key(0), DIM)
    k = vectors(1, 1, 2, 140).swapaxes(1, 2)
    cache = rqjax.append(strategy.cache(1, 2, 256, window=0, sinks=0), k, k)
    for part in (strategy.keys, strategy.values, cache):
        rqjax.save(part, tmp_path / "part.safetensors")
        again = rqjax.load(tmp_path / "part.safetensors")
        assert jax.tree.structure(again) == jax.tree.structure(part)
        jax.tree.map(np.testing.assert_array_equal, again, part)


@pytest.mark.full
def test_zeros_decode_to_zeros_and_partial_tiles_are_rejected():
    strategy = rqjax.strategy("kvarn_2", jax.random.key(0), DIM)
    for quantizer in (strategy.keys, strategy.values):
        assert not np.any(quantizer.decode(quantizer.encode(np.zeros((TILE, DIM), np.float32))))
        with pytest.raises(ValueError, match="a multiple of 128 tokens, 64"):
            quantizer.encode(vectors(0, 100))
