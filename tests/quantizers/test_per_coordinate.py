"""Levels and bits of each coordinate's own, gains, and quantizers of each head."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import codebooks
from rqjax.quantizers.per_coordinate import PerCoordinate
from rqjax.recipes.allocation import allocate
from tests.cache.test_cache import append, attend

BITS = (6, 6, 4, 3, 3, 3, 1, 1, 0, 0, 0)
DEVIATION = np.exp2(BITS).astype(np.float32)
X = np.random.default_rng(0).standard_normal((2, 300, len(BITS))).astype(np.float32) * DEVIATION
trip = jax.jit(lambda q, x: q.decode(q.encode(x)))
lloyd = jax.jit(PerCoordinate.lloyd, static_argnums=1, static_argnames="iterations")


def test_each_coordinate_has_its_nearest_level():
    columns = PerCoordinate.gaussian(jnp.ones(len(BITS)), jnp.asarray(DEVIATION), BITS)
    decoded = np.asarray(trip(columns, X))
    assert columns.dim == len(BITS)
    levels = [np.asarray(part)[:, i] for part in columns.levels for i in range(part.shape[1])]
    for i, own in enumerate(levels):
        assert len(own) == 2 ** BITS[i]
        nearest = own[np.abs(X[..., i, None] - own).argmin(-1)]
        np.testing.assert_array_equal(decoded[..., i], nearest)


@pytest.mark.parametrize("bits", [BITS, pytest.param((3,) * 16, marks=pytest.mark.full), (8, 5, 1), (0, 0)])
def test_codes_are_packed_to_whole_bytes(bits):
    columns = PerCoordinate.gaussian(jnp.zeros(len(bits)), jnp.ones(len(bits)), bits)
    x = jnp.asarray(X[..., :1].repeat(len(bits), -1))
    codes = columns.encode(x)
    assert codes.dtype == jnp.uint8
    assert 8 * codes[0, 0].nbytes == columns.bits_per_vector == -(-sum(bits) // 8) * 8
    np.testing.assert_array_equal(columns.indices(codes), columns.nearest(x))


def test_learned_levels_suit_the_samples():
    """A mixture of two peaks: Gaussian levels lose a factor of five; with few samples they are what is learned."""
    peaks = jax.random.rademacher(jax.random.key(1), (4000, 8)) + 0.1 * jax.random.normal(jax.random.key(2), (4000, 8))
    learned, prior = lloyd(peaks[:2000], (2,) * 8), lloyd(peaks[:2000], (2,) * 8, iterations=0)
    held_out = peaks[2000:]
    errors = [float(jnp.mean((held_out - trip(q, held_out)) ** 2)) for q in (learned, prior)]
    assert errors[0] < errors[1] / 5
    few = lloyd(held_out[:3], (4,) * 8, iterations=1)
    unit = (few.levels[0] - held_out[:3].mean(0)) / held_out[:3].std(0)
    np.testing.assert_allclose(unit, np.repeat(codebooks.gaussian(4)[:, None], 8, 1), atol=0.5)


def test_allocation_is_optimal_and_exact():
    variances = np.array([9.0, 2.0, 1.0, 0.3])
    errors = np.array([1.0, *(codebooks.distortion(b) for b in range(1, 9))])
    for total in range(0, 9):
        choices = [c for c in itertools.product(range(9), repeat=4) if sum(c) == total]
        least = min(float((variances * errors[list(c)]).sum()) for c in choices)
        bits = allocate(variances, total)
        assert sum(bits) == total
        np.testing.assert_allclose((variances * errors[list(bits)]).sum(), least)
    assert allocate(np.ones(128), 3 * 128) == (3,) * 128
    assert sum(allocate(np.ones(128), 3 * 128 + 16)) == 400
    assert allocate(variances, 33) == (8,) * 4
    with pytest.raises(ValueError, match="expected bits to give away, got -1"):
        allocate(variances, -1)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 2)], "expected powers of two of levels"),
        ([(2, 2), (4, 1)], "expected the classes of most bits first"),
        ([], "expected powers of two"),
    ],
)
def test_columns_reject_invalid_level_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        PerCoordinate(tuple(map(np.zeros, shapes)))


def test_gains_follow_sizes_over_the_whole_range():
    """Loud coordinates do not rule the gain; 8 bits reach from 1e-4 to 1e4."""
    deviation = jnp.asarray(DEVIATION)
    columns = PerCoordinate.gaussian(jnp.zeros(len(BITS)), deviation, BITS)
    gain = rqjax.Gain(1 / (len(BITS) * deviation**2), columns)
    assert gain.bits_per_vector == 8 + 32
    usual = rqjax.metrics.relative_mse(X, trip(gain, X))
    for scale in (1e-4, 1e4):
        np.testing.assert_allclose(rqjax.metrics.relative_mse(X, trip(gain, X * scale) / scale), usual, rtol=0.1)
    assert jnp.abs(trip(gain, jnp.zeros_like(X))).max() < 1e-2


@pytest.fixture(scope="module")
def heads():
    keys = jax.random.split(jax.random.key(3), 3)
    return rqjax.PerHead(jax.jit(jax.vmap(lambda key: rqjax.rotorquant(key, 32, 3)))(keys))


@pytest.mark.full
def test_per_head_is_each_head_by_itself(heads):
    x = jax.random.normal(jax.random.key(4), (2, 3, 40, 32))
    codes = jax.jit(lambda q, x: q.encode(x))(heads, x)
    decoded = jax.jit(lambda q, c: q.decode(c))(heads, codes)
    assert 8 * rqjax.nbytes(codes) == 240 * heads.bits_per_vector
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], heads.inner)
        np.testing.assert_allclose(decoded[:, i], trip(one, x[:, i]), atol=1e-6)
    y = jax.random.normal(jax.random.key(5), (4, 32))
    products = jax.jit(lambda q, y, c: q.dot(y, c))(heads, y, codes)
    np.testing.assert_allclose(products, jnp.einsum("md,bhtd->mbht", y, decoded, precision="highest"), atol=1e-5)
    ones = jnp.ones(32)
    for nest in (rqjax.Centered(ones, heads), rqjax.Residual(heads, heads), rqjax.Gain(ones / 32, heads)):
        products = jax.jit(lambda q, y, x: (q.dot(y, q.encode(x)), q.decode(q.encode(x))))(nest, y, x)
        np.testing.assert_allclose(products[0], jnp.einsum("md,bhtd->mbht", y, products[1]), atol=1e-4)
    with pytest.raises(ValueError, match=r"expected vectors \(..., 3 heads, tokens, 32\), got shape \(2, 40, 32\)"):
        heads.encode(x[:, 0])


@pytest.mark.full
def test_a_cache_of_quantizers_per_head(heads):
    """A cache equals three caches of one head: integer tiles for the keys, decoded blocks for the values."""
    k = jax.random.normal(jax.random.key(6), (2, 60, 3, 32))
    values = rqjax.PerHead(jax.vmap(lambda x: lloyd(x, (3,) * 32, iterations=5))(jnp.swapaxes(k[0], 0, 1)))

    def run(keys, values, k):
        cache = rqjax.KVCache.init(2, k.shape[2], 96, keys, values, window=8, sinks=2, dtype=jnp.float32)
        return attend(append(cache, k, k[:, ::-1]), k[:, -1:])

    whole = run(heads, values, k)
    for i in range(3):
        one = [jax.tree.map(lambda leaf, i=i: leaf[i], q.inner) for q in (heads, values)]
        np.testing.assert_allclose(whole[:, :, i : i + 1], run(*one, k[:, :, i : i + 1]), atol=1e-6)
