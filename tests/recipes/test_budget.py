"""Product quantization, element exchange, and matrices under a memory budget."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import Exchange, Product
from rqjax.arrays.kmeans import kmeans, nearest
from rqjax.quantizers.exchange import exchange
from rqjax.quantizers.product import Rounded
from rqjax.recipes.budget import Setting, Stage
from tests.tools.suites import some

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def matrix(n, d, outliers=1e-3):
    keys = jax.random.split(KEY, 3)
    x = 0.5 + 0.16 * jax.random.truncated_normal(keys[0], -3.1, 3.1, (n, d))
    far = jax.random.uniform(keys[1], (n, d), minval=-100, maxval=100)
    return jnp.where(jax.random.uniform(keys[2], (n, d)) < outliers, far, x)


@jax.jit
def decode(quantizer, codes):
    return quantizer.decode(codes)


@jax.jit
def error(x, quantizer, codes):
    return jnp.mean((x - quantizer.decode(codes)) ** 2)


def test_exchange_orders_pairs_and_is_undone_exactly():
    x = jnp.array([[3.0, 1, 2, 2, 0, 5, 7, 6]])
    y, maps = exchange(x, 2)
    np.testing.assert_array_equal(exchange(x, 1)[0], [[1, 2, 0, 6, 3, 2, 5, 7]])
    np.testing.assert_array_equal(y, [[1, 0, 2, 6, 2, 5, 3, 7]])
    np.testing.assert_array_equal(maps[0], [[False, False, True, False]])
    same = Exchange(rqjax.Exact(8, "float32"), levels=3)
    codes = same.encode(x)
    assert codes[0].shape == (1, 2)  # 12 bits
    np.testing.assert_array_equal(same.decode(codes), x)


def test_one_exchange_shrinks_the_variance_within_leaves_as_theorem_2_says():
    x = jax.random.normal(KEY, (4096, 64))
    variance = jax.jit(lambda x: exchange(x, 1)[0].reshape(-1, 2, 32).var(axis=(0, 2)).mean())(x)
    np.testing.assert_allclose(variance, 1 - 1 / np.pi, rtol=0.01)


@pytest.mark.full
def test_kmeans_finds_clusters_and_its_error_never_rises():
    centers = 10 * jax.random.normal(KEY, (3, 16, 4))
    x = jnp.repeat(centers, 9, axis=1) + 0.01 * jax.random.normal(KEY, (3, 144, 4))
    found = kmeans(KEY, x, 16)
    for own, near in zip(centers, found, strict=True):
        gaps = jnp.linalg.norm(own[:, None] - near, axis=-1)
        assert float(gaps.min(axis=1).max()) < 0.05

    @functools.partial(jax.jit, static_argnums=0)
    def left(iterations):
        centroids = kmeans(KEY, noise[None], 50, iterations)[0]
        return jnp.mean((noise - centroids[nearest(noise, centroids)]) ** 2)

    noise = jax.random.normal(KEY, (300, 4))
    errors = [float(left(i)) for i in (0, 1, 5, 20)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]


@pytest.mark.full
def test_the_nearest_centroid_is_that_of_a_full_search_in_blocks_too():
    x, centroids = jax.random.normal(KEY, (1100, 3)), jax.random.normal(jax.random.key(1), (1000, 3))
    squares = ((np.asarray(x)[:, None].astype(np.float64) - np.asarray(centroids)) ** 2).sum(-1)
    found = np.asarray(jax.jit(nearest)(x, centroids))
    best = squares.min(axis=1)
    np.testing.assert_allclose(squares[np.arange(1100), found], best, atol=1e-5)
    assert nearest(jnp.zeros((1, 2)), jnp.array([[1.0, 0], [0, 1], [-1, 0]]))[0] == 0  # ties: the first


@pytest.mark.full
def test_kmeans_with_as_many_centroids_as_vectors_and_with_equal_vectors():
    x = jax.random.normal(KEY, (1, 20, 2))
    all_of_them = kmeans(KEY, x, 20)[0]
    np.testing.assert_allclose(np.sort(all_of_them, axis=0), np.sort(x[0], axis=0), rtol=1e-6)
    np.testing.assert_array_equal(kmeans(KEY, jnp.ones((1, 20, 2)), 5), jnp.ones((1, 5, 2)))
    with pytest.raises(ValueError, match=r"number of centroids, to be a whole number from 1 to 20, got 21"):
        kmeans(KEY, x, 21)


def test_a_rounded_codebook_is_within_half_a_step_and_packed_exactly():
    codebooks = jax.random.normal(KEY, (4, 5, 8))
    rounded = Rounded.of(codebooks, 10)
    step = (codebooks.max(axis=(1, 2)) - codebooks.min(axis=(1, 2))) / 1023
    assert bool((jnp.abs(rounded.values - codebooks) <= 0.501 * step[:, None, None]).all())
    assert rqjax.nbytes(rounded) == 4 * (5 * 8 * 10 // 8 + 2 * 4)


RECIPES = [("pq", 1), ("opq", 3), ("lopq", 1), ("qet", 3)]


@pytest.mark.parametrize(("name", "bits"), some(RECIPES, [("qet", 3)]))
def test_recipes_take_their_bits(name, bits):
    x = jnp.stack([matrix(300, 32), matrix(300, 32)[::-1]])
    quantizer = rqjax.FITTED[name](KEY, x, bits)
    codes = jax.jit(lambda q, x: q.encode(x))(quantizer, x)
    assert 8 * rqjax.nbytes(codes) == 2 * 300 * (32 * bits + 8 * (name == "lopq"))
    assert float(error(x, quantizer, codes)) < 0.5 * float(x.var())


@pytest.mark.full
def test_a_rotation_helps_where_coordinates_are_correlated():
    factor = jax.random.normal(KEY, (32, 32)) @ jnp.diag(0.8 ** jnp.arange(32.0))
    x = jax.random.normal(jax.random.key(1), (2000, 32)) @ factor.T
    errors = {}
    for name in ("pq", "opq", "lopq"):
        quantizer = rqjax.FITTED[name](KEY, x, 1)
        errors[name] = float(error(x, quantizer, quantizer.encode(x)))
    assert errors["opq"] < 0.8 * errors["pq"]
    assert errors["lopq"] < 1.05 * errors["opq"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "ratio", "shape", "word_bits"),
    some(
        [
            (("rtn", "pq", "lopq", "qet_cqo", "qet_best"), 5.5, (200, 64), 32),
            (("rtn", "opq", "qet"), 2, (256, 64), 16),
            (("rtn", "lopq", "qet"), 16, (1, 256), 32),
        ],
        [(("rtn", "opq", "qet"), 2, (256, 64), 16)],
    ),
)
def test_stored_bytes_never_exceed_the_budget(names, ratio, shape, word_bits):
    """Matrices come near the budget, too, if centroids are what fills it."""
    x, budget = matrix(*shape), shape[0] * shape[1] * word_bits / (8 * ratio)
    fitted = {}
    for name in names:
        try:
            tree = rqjax.fit_under_budget(name, KEY, x, ratio, word_bits=word_bits)
        except ValueError as error:
            assert "does not hold" in str(error)  # noqa: PT017
        else:
            assert decode(*tree).shape == shape
            fitted[name] = rqjax.nbytes(tree) / budget
    assert max(fitted.values()) <= 1
    if shape[0] > 1:
        assert min(share for name, share in fitted.items() if name != "rtn") > 0.8
        assert set(names) - set(fitted) <= {"opq", "lopq"}


@pytest.mark.full
def test_error_of_each_part_of_qet_relative_to_pq():
    """Errors at ratio 4 are the paper's: 36.5 % of PQ's without optimizations, 40 % of that with rounded codebooks, 7 %
    with all. The matrix of 1024 x 128 has outliers, one in ten thousand."""
    x = matrix(1024, 128, 1e-4)
    mse = {
        name: float(error(x, *rqjax.fit_under_budget(name, KEY, x, 4)))
        for name in ("pq", "qet_vanilla", "qet_cqo", "qet")
    }
    assert mse["qet_vanilla"] / mse["pq"] == pytest.approx(0.365, abs=0.015)
    assert mse["qet_cqo"] / mse["qet_vanilla"] == pytest.approx(0.39, abs=0.03)
    assert mse["qet"] / mse["pq"] == pytest.approx(0.07, abs=0.006)


@pytest.mark.full
def test_levels_of_exchange_fall_where_maps_would_eat_the_budget():
    x = matrix(512, 64)
    quantizer, _ = rqjax.fit_under_budget("qet", KEY, x, 8, word_bits=16)  # 2 bits: three levels are 1.5
    assert quantizer.first.levels == 3
    quantizer, _ = rqjax.fit_under_budget("qet", KEY, x, 11, word_bits=16)
    assert quantizer.first.levels == 2
    quantizer, _ = rqjax.fit_under_budget("l3c10p0.7+c10p0.3@1", KEY, x, 10, word_bits=16)
    assert quantizer.first.levels == 3


@pytest.mark.full
def test_constant_matrices_are_exact():
    x = jnp.full((64, 64), 0.3)
    for name in ("rtn", "pq", "qet"):
        np.testing.assert_allclose(decode(*rqjax.fit_under_budget(name, KEY, x, 4)), x, rtol=1e-6)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (jnp.ones((0, 8)), {}, r"expected a matrix \(n, d\) of floating-point numbers, got float32 \(0, 8\)"),
        (jnp.ones(8), {}, r"expected a matrix"),
        (jnp.ones((4, 8), int), {}, r"expected a matrix .* int32"),
        (jnp.ones((8, 64)).at[3].set(jnp.nan), {}, r"that float32 holds, got 64 others"),
        (jnp.full((8, 64), 1e5), {"word_bits": 16}, r"that float16 holds"),
        (jnp.ones((8, 64)), {"word_bits": 8}, r"words of 32 or 16 bits, got 8"),
        (jnp.ones((8, 64)), {"ratio": -1}, r"a ratio above 0"),
        (jnp.ones((64, 72)), {}, r"8 \* 2\^3 does not divide the dimension 72"),
        (jnp.ones((8, 64)), {"ratio": 64}, r"a budget of \d+ bytes does not hold the \d+ bytes"),
        (jnp.ones((8, 64)), {"method": "w8x2"}, r"expected a setting like 'l3w8c10p0.7\+w8c10p0.3', got 'w8x2'"),
        (jnp.ones((8, 64)), {"method": "w8+w8"}, r"shares of at most 1 together, got 2 in 'w8\+w8'"),
        (jnp.ones((8, 64)), {"method": "qat"}, r"unknown method under a budget 'qat'; did you mean 'qet'"),
    ],
)
def test_what_cannot_be_fitted_says_why(x, options, message):
    options = {"method": "qet", "ratio": 4, **options}
    with pytest.raises((ValueError, KeyError), match=message):
        rqjax.fit_under_budget(options.pop("method"), KEY, x, options.pop("ratio"), **options)


def test_shapes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"2\^2 = 4 divides for 2 levels of exchange, got 6"):
        Exchange(rqjax.Exact(6, "float32"), levels=2)
    with pytest.raises(ValueError, match=r"width of groups that divides the dimension 64, got 7"):
        Product.fit(KEY, jnp.ones((8, 64)), 7, 2)


@pytest.mark.full
def test_settings_of_ones_own():
    x = matrix(512, 64)
    assert Setting.parse("l2w4c8p0.6+l1w16p0.4").stages == (Stage(2, 0.6, 8, 4), Stage(1, 0.4, None, 16))
    quantizer, codes = rqjax.fit_under_budget("l2w4c8p0.6+l1w16p0.4", KEY, x, 6)
    assert [quantizer.first.levels, quantizer.second.levels] == [2, 1]
    assert rqjax.nbytes((quantizer, codes)) <= x.nbytes / 6
    parts = itertools.chain(quantizer.first.inner.codebooks.shape[2:], quantizer.second.inner.codebooks.shape[2:])
    assert list(parts) == [4, 16]
