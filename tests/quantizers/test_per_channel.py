"""Scales along time, in a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.plain import PlainCache, error

pytestmark = pytest.mark.full

DIM = 64


def vectors(seed, *shape):
    return np.random.default_rng(seed).normal(size=(*shape, DIM)).astype(np.float32)


def asymmetric(groups, bits):
    """KIVI's formula: Q(X) = round((X - z) / s), z = min X, s = (max X - min X) / (2^B - 1), along the last axis."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    return np.round((groups - low) / scale) * scale.astype(np.float16) + low.astype(np.float16)


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_is_its_formula(bits):
    """Keys in groups of 32 tokens of a channel, values in groups of 32 channels of a token."""
    strategy, x = rqjax.strategy(f"kivi_{bits}", jax.random.key(0), DIM), vectors(0, 96)
    keys, values = (np.asarray(q.decode(q.encode(x))) for q in (strategy.keys, strategy.values))
    expected = asymmetric(x.reshape(3, 32, DIM).swapaxes(1, 2), bits).swapaxes(1, 2).reshape(96, DIM)
    np.testing.assert_allclose(keys, expected, atol=1e-5)
    np.testing.assert_allclose(values, asymmetric(x.reshape(96, 2, 32), bits).reshape(96, DIM), atol=1e-5)
    assert strategy.keys.bits_per_vector == strategy.values.bits_per_vector == DIM * (bits + 1)


@pytest.mark.parametrize("chunks", [(150,), (7, 64, 1, 78)])
def test_a_cache_encodes_whole_tiles(chunks):
    strategy = rqjax.strategy("kivi_2", jax.random.key(0), DIM)
    cache = strategy.cache(2, 2, 256, window=16, sinks=3, dtype=jnp.float32)
    k, v, q = vectors(1, 2, 150, 2), vectors(2, 2, 150, 2), vectors(3, 2, 1, 4)
    assert cache.unit == 32
    plain, start = PlainCache(cache), 0
    for size in chunks:
        part = k[:, start : start + size], v[:, start : start + size]
        cache, start = rqjax.append(cache, *part), start + size
        plain.append(*part)
    assert cache.coded.tolist() == [128, 128]  # of 150 - 16 - 3 = 131
    assert error(rqjax.attend(cache, q), plain.attend(q)) < 1e-4


def test_chunks_do_not_change_codes():
    strategy, k = rqjax.strategy("kivi_4", jax.random.key(0), DIM), vectors(1, 1, 200, 2)
    empty = strategy.cache(1, 2, 256, window=0, sinks=0)
    whole, parts = rqjax.append(empty, k, k), empty
    for start in range(0, 200, 25):
        parts = rqjax.append(parts, k[:, start : start + 25], k[:, start : start + 25])
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def test_partial_tiles_are_rejected():
    keys = rqjax.strategy("kivi_2", jax.random.key(0), DIM).keys
    with pytest.raises(ValueError, match="a multiple of 32"):
        keys.encode(vectors(0, 33))
    with pytest.raises(ValueError, match="codes of one vector each, got those of 32"):
        rqjax.Index.build(rqjax.Centered(jnp.zeros(DIM), keys), vectors(0, 64))
    odd = rqjax.PerChannel(rqjax.MinMax(48, 2, group_size=48), dim=DIM)
    with pytest.raises(ValueError, match="tiles that divide 128 tokens, got 48 and 48"):
        rqjax.KVCache.init(1, 1, 256, odd, odd)
