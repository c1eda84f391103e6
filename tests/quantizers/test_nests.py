"""Combinators around quantizers that do not take each vector alone, or have a quantizer for each head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax

CHANNELS = rqjax.PerChannel(rqjax.MinMax(32, 4, group_size=32), dim=64)


def per_head():
    return rqjax.PerHead(
        jax.vmap(lambda key: rqjax.rotorquant(key, 64, 3).inner)(jax.random.split(jax.random.key(0), 2))
    )


@pytest.mark.parametrize("inner", [per_head(), CHANNELS], ids=["heads", "tiles"])
@pytest.mark.parametrize("wrapped", [rqjax.Scaled, rqjax.Normalized])
def test_many_vectors_are_encoded_as_few(inner, wrapped):
    q, x = wrapped(inner), jax.random.normal(jax.random.key(1), (2, 20_000, 64))
    whole, part = jax.jit(q.encode)(x), q.encode(x[:, :64])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, : b.shape[1]], b), whole, part)


def test_bits_of_quantizers_for_each_head():
    assert rqjax.Scaled(per_head()).bits_per_vector == per_head().bits_per_vector + 16 == 3 * 64 + 16
    one = rqjax.PerHead(jax.tree.map(lambda leaf: leaf[None], rqjax.eden(jax.random.key(0), 64, 3)))
    assert one.bits_per_vector == rqjax.Scaled(one).bits_per_vector - 16 == 3 * 64 + 16
    assert rqjax.AcrossHeads(one, group=2).bits_per_vector == (3 * 64 + 16) / 2


def test_a_residual_of_tiles():
    q = rqjax.Residual(CHANNELS, rqjax.eden(jax.random.key(0), 64, 2))
    assert q.bits_per_vector == CHANNELS.bits_per_vector + 2 * 64 + 16
    x = jax.random.normal(jax.random.key(1), (1, 300, 1, 64))
    cache = rqjax.append(rqjax.KVCache.init(1, 1, 512, q, q), x, x)
    assert cache.unit == 32
    exact = rqjax.append(rqjax.strategy("float32", jax.random.key(0), 64).cache(1, 1, 512), x, x)
    found, expected = rqjax.attend(cache, x[:, -1:]), rqjax.attend(exact, x[:, -1:])
    assert np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)
    with pytest.raises(ValueError, match="expected a quantizer of each vector alone, got one of tiles of 32"):
        rqjax.Exchange(CHANNELS, levels=1)


def test_norms_beyond_float16_are_its_largest():
    q = rqjax.Normalized(rqjax.lloyd_max(64, 3), dtype="float16")
    x = 1e5 * jax.random.normal(jax.random.key(0), (5, 64))
    assert np.isfinite(q.decode(q.encode(x))).all()
    assert np.isnan(q.decode(q.encode(x.at[0].set(jnp.nan)))[0]).all()


def test_a_grid_of_tiny_steps_keeps_its_range():
    x = 5e-5 * jax.random.normal(jax.random.key(0), (100, 8))
    grid = rqjax.Uniform.of(x.astype(jnp.float16), 14)
    np.testing.assert_allclose(grid.decode(grid.encode(x)), x, atol=6.2e-5 / 2)
    assert float(jnp.abs(grid.decode(grid.encode(x)) - x).max()) < float(jnp.abs(x).max())


def test_one_coordinate_has_all_bits():
    q = rqjax.TrellisPerCoordinate.gaussian(jnp.zeros(2), jnp.ones(2), bits=(8, 0))
    x = jax.random.normal(jax.random.key(1), (50, 2))
    assert np.abs(q.decode(q.encode(x)) - x)[:, 0].mean() < 0.05
