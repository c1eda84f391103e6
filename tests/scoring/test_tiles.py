"""The layout of codes in a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import METHODS
from rqjax.arrays.levels import look_up
from rqjax.core import TokenArray
from rqjax.scoring import tiles
from tests.tools.plain import error
from tests.tools.suites import some


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("shape", [(16, 5), (2, 3, 128, 4), (20, 7), (1, 1)])
def test_rows_round_trip_in_exactly_their_bits(bits, shape):
    indices = np.random.default_rng(bits).integers(0, 2**bits, shape).astype(np.uint32)
    packed = jax.jit(tiles.pack_rows, static_argnums=1)(indices, bits)
    assert sum(part.shape[-2] for part in packed) == -(-shape[-2] // 8) * bits
    unpacked = jax.jit(tiles.unpack_rows, static_argnums=(1, 2))(packed, bits, shape[-2])
    np.testing.assert_array_equal(unpacked, indices)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_look_up_is_indexing(bits, symmetric):
    levels = np.sort(np.random.default_rng(0).choice(np.arange(1, 120), 2**bits, replace=False)).astype(np.int8)
    if symmetric:
        levels = np.concatenate([-levels[2 ** (bits - 1) :][::-1], levels[2 ** (bits - 1) :]])
    indices = np.random.default_rng(1).integers(0, 2**bits, 100).astype(np.uint8)
    found = look_up(jnp.asarray(indices), jnp.asarray(levels), symmetric=symmetric)
    np.testing.assert_array_equal(found, levels[indices])


CASES = [("turboquant", 4, 64), ("turboquant_mixed", 2.5, 80), ("turboquant_prod", 3, 32), ("affine", 3, 128)]
CASES += [("affine_rotated_sign", 3, 64), ("rtn", 8, 96), ("rotorquant", 4, 20), ("eden", 8, 32)]
CASES += [("turboquant_trellis", 2.5, 48), ("turboquant_trellis", 6, 20)]


@pytest.mark.parametrize(("name", "bits", "dim"), some(CASES, [CASES[2], CASES[3], CASES[-1]]))
def test_products_with_codes_are_those_with_decoded_vectors(name, bits, dim):
    """Scores and weighted sums, with a mean taken off; to 1e-4, and to 1e-5 where nothing is split into limbs."""
    in_limbs = name != "eden"
    keys = jax.random.split(jax.random.key(0), 4)
    mean = jax.random.normal(keys[0], (dim,))
    quantizer = rqjax.Centered(mean, METHODS[name](keys[1], dim, bits))
    x = jax.random.normal(keys[2], (2, 3, 32, dim)) + mean
    y = jax.random.normal(keys[3], (2, 3, 2, dim))

    @jax.jit
    def errors(quantizer, x, y):
        codes = quantizer.encode(x)
        decoded = quantizer.decode(codes)
        keys, values = (read(quantizer, codes, 32, transposed=turned) for turned in (False, True))
        scores = quantizer.scores(quantizer.prepare(y), keys)
        w = jax.nn.softmax(4 * scores / dim**0.5)
        sums = quantizer.restore(quantizer.weigh(w, values))
        exact_scores = jnp.einsum("bhrd,bhtd->bhrt", y, decoded, precision="highest")
        exact_sums = jnp.einsum("bhrt,bhtd->bhrd", w, decoded, precision="highest")
        pairs = ((scores, exact_scores), (sums, exact_sums))
        return [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs]

    assert max(errors(quantizer, x, y)) < (1e-4 if in_limbs else 1e-5)


def read(quantizer, codes, tokens, *, transposed):
    laid_out = quantizer.laid_out(codes, transposed)
    return jax.tree.map(lambda leaf: leaf.read(0, tokens), laid_out, is_leaf=TokenArray.is_one)


def test_small_weights_beside_a_large_one_are_kept():
    """A flat tail of 1e-5 beside a weight of 1, as retrieval heads have it: 15 bits would lose all of it."""
    quantizer, rng = rqjax.lloyd_max(32, 4), np.random.default_rng(0)
    values = (rng.choice([-1, 1], 32) + 0.1 * rng.standard_normal((1, 1, 4096, 32))).astype(np.float32) / 6
    w = (1e-5 * rng.uniform(0.5, 1.5, (1, 1, 1, 4096))).astype(np.float32)
    w[..., 0] = 1

    @jax.jit
    def through(quantizer, values, w):
        codes = quantizer.encode(values)
        sums = quantizer.weigh(w, read(quantizer, codes, 4096, transposed=True))
        return sums, quantizer.decode(codes)

    sums, decoded = through(quantizer, values, w)
    assert error(sums, w @ np.asarray(decoded, np.float64)) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("name", ["rtn", "rotorquant"])
def test_a_loud_coordinate_of_a_query_costs_less_than_the_codes(name):
    """One coordinate of 1,000 times the others takes 10 of 15 bits from them. The error is 2e-5 of the norms, and a
    twentieth of the codes' own, even where the keys have exactly nothing in that coordinate."""
    quantizer, rng = METHODS[name](jax.random.key(9), 128, 4), np.random.default_rng(0)
    x, y = (rng.standard_normal((1, 1, n, 128)).astype(np.float32) for n in (512, 4))
    x[..., 5], y[..., 5] = 0, 1000

    @jax.jit
    def through(quantizer, x, y):
        codes = quantizer.encode(x)
        keys = read(quantizer, codes, 512, transposed=False)
        return quantizer.scores(quantizer.prepare(y), keys), quantizer.decode(codes)

    scores, decoded = (np.asarray(a, np.float64) for a in through(quantizer, x, y))
    lost, own = scores - y @ decoded.swapaxes(2, 3), y.astype(np.float64) @ (x - decoded).swapaxes(2, 3)
    norms = np.linalg.norm(y, axis=-1)[..., None] * np.linalg.norm(decoded, axis=-1)[:, :, None]
    assert np.sqrt(np.mean((lost / norms) ** 2)) < 2e-5
    assert np.sqrt(np.mean(lost**2) / np.mean(own**2)) < 0.06


def test_extreme_queries():
    quantizer, rng = rqjax.lloyd_max(16, 3), np.random.default_rng(0)
    x = rng.standard_normal((1, 1, 16, 16)).astype(np.float32) / 4
    y = jnp.asarray([0, 1e30, 1e-30, np.nan], jnp.float32)[:, None] * jnp.ones((1, 1, 4, 16))

    @jax.jit
    def through(quantizer, x, y):
        codes = quantizer.encode(x)
        keys = read(quantizer, codes, 16, transposed=False)
        return quantizer.scores(quantizer.prepare(y), keys), quantizer.decode(codes)

    scores, decoded = through(quantizer, x, y)
    exact = np.asarray(y, np.float64) @ np.asarray(decoded, np.float64).swapaxes(2, 3)
    np.testing.assert_allclose(scores, exact, rtol=1e-3)
