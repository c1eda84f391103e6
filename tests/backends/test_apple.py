"""Programs for jax-metal and jax-mps, without a Mac: their operations, and what is made on the host."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.core import platforms
from rqjax.learning.training import fit
from rqjax.rotations import Dense
from tests.tools import apple
from tests.tools.suites import distinct, some

RNG = np.random.default_rng(0)
X, TOKENS = (RNG.standard_normal(shape).astype(np.float32) for shape in ((64, 128), (2, 300, 2, 128)))


@pytest.fixture(params=some(platforms.APPLE, ["METAL"]), scope="module")
def device(request):
    with apple.formulated(request.param) as name:
        yield name


def method(name):
    return rqjax.METHODS[name](jax.random.key(0), 128, 2.5 if name == "turboquant_mixed" else 3)


def violations(platform, function, *operands):
    return apple.violations(jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)))


@pytest.mark.parametrize("name", some(distinct(rqjax.METHODS), ["rotorquant_trellis", "turboquant_prod", "affine"]))
def test_methods_are_of_known_operations(device, name):
    quantizer = method(name)
    codes = jax.eval_shape(quantizer.encode, X)
    assert not violations(device, lambda q, x: q.encode(x), quantizer, X)
    assert not violations(device, lambda q, c: q.decode(c), quantizer, codes)
    assert not violations(device, lambda q, y, c: q.dot(y, c), quantizer, X[:4], codes)


@pytest.mark.parametrize("name", some(apple.STRATEGIES, apple.STRATEGIES[:1]))
def test_caches_are_of_known_operations(device, name):
    cache = rqjax.strategy(name, jax.random.key(0), 128).cache(2, 2, 512)
    assert not violations(device, rqjax.append, cache, TOKENS, TOKENS)
    assert not violations(device, rqjax.attend, cache, TOKENS[:, :1])
    options = {"sliding_window": 100, "softcap": 30.0}
    narrow = lambda cache, q: rqjax.attend(cache, q, sink_logits=jnp.ones(2), **options)  # noqa: E731
    assert not violations(device, narrow, cache, TOKENS[:, :3])


@pytest.mark.parametrize("name", some(["turboquant", "turboquant_trellis", "affine"], ["turboquant"]))
def test_search_is_of_known_operations(device, name):
    index = rqjax.Index.build(method(name), X, metric="l2", store=rqjax.Exact(128, "float16"))
    assert not violations(device, lambda index, y: index.search(y, 5, rerank=10), index, X[:4])


@pytest.mark.full
def test_training_is_of_known_operations(device):
    def train(quantizer, x, key):
        return fit(quantizer, x, key, where=lambda q: q.inner.rotation, steps=20, batch_size=16)

    assert not violations(device, train, method("rotorquant"), X, jax.random.key_data(jax.random.key(2)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (jnp.linalg.qr, "custom_call: not legalised by jax-metal"),
        (lambda x: jnp.fft.fft(x[0]), "complex<f32>: no such numbers"),
        (lambda x: jax.lax.population_count(x.astype(jnp.int32)), "popcnt: not legalised by jax-metal"),
        (lambda x: jnp.matmul(x.astype(jnp.int8), x.T.astype(jnp.int8)), "dot_general of .*: products are of floats"),
        (lambda x: jnp.sum(jnp.zeros((2, 2, 2, 2, 2)) + x[0, 0], axis=0), "reduce beyond the last four axes"),
        (lambda x: jax.lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)]), "pad between numbers"),
        (jnp.cbrt, "cbrt: not known to work"),
    ],
)
def test_other_operations_are_found(function, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(violations("METAL", function, X[:16, :16]))


def test_numbers_of_64_bits_are_found():
    jax.config.update("jax_enable_x64", True)
    found = violations("METAL", lambda x: x * x, jnp.ones(3, "float64"))
    jax.config.update("jax_enable_x64", False)
    assert found == ["stablehlo.multiply of f64: no such numbers"]


SAME = ("turboquant", "rotorquant_paper_prod", "rotorquant_trellis", "affine_rotated_sign")


@pytest.mark.parametrize("name", some(SAME, ["turboquant"]))
def test_methods_are_the_same_as_on_a_cpu(name):
    def made_and_used(platform):
        def used(quantizer, x):
            codes = quantizer.encode(x)
            return quantizer.decode(codes), quantizer.dot(x[:4], codes)

        with apple.formulated(platform):
            quantizer = method(name)
            return quantizer, *jax.jit(used)(quantizer, X)

    (here, decoded, dots), (there, *found) = map(made_and_used, ("cpu", "METAL"))
    jax.tree.map(np.testing.assert_array_equal, there, here)
    np.testing.assert_allclose(found[0], decoded, atol=1e-5)
    np.testing.assert_allclose(found[1], dots, atol=1e-4)


@pytest.mark.full
def test_random_matrices_are_made_on_the_host(device):
    made = Dense.haar(jax.random.key(0), 16)
    np.testing.assert_allclose(made.matrix @ made.matrix.T, jnp.eye(16), atol=1e-5)
    with apple.formulated("cpu"):
        np.testing.assert_array_equal(made.matrix, Dense.haar(jax.random.key(0), 16).matrix)
    with pytest.raises(ValueError, match=rf"on {device} there are no eigenvectors under jit or vmap: fit outside"):
        jax.jit(Dense.klt)(X)
    x = jnp.asarray(X.reshape(-1, 8))
    fitted = rqjax.FITTED["opq"](jax.random.key(0), x, 4)
    assert platforms.platform() == device
    assert float(jnp.mean((fitted.decode(fitted.encode(x)) - x) ** 2)) < 0.1


@pytest.mark.parametrize("block", [None, 16])
def test_rotations_under_jit_are_made_on_the_device(device, block):
    """Rotations under jit use plain operations only and are the same up to rounding."""
    key = jax.random.key_data(jax.random.key(0))
    make = jax.jit(lambda key: Dense.haar(key, 128, block=block).matrix)
    made = make(key)
    with apple.formulated("cpu"):
        np.testing.assert_allclose(made, Dense.haar(key, 128, block=block).matrix, atol=2e-5)
    np.testing.assert_allclose(made @ made.T, jnp.eye(128), atol=2e-6)
    assert not apple.violations(make.trace(key).lower(lowering_platforms=(device,)))
    shapes = jax.eval_shape(lambda key: rqjax.METHODS["turboquant"](key, 16, 3), key)
    assert shapes.bits_per_vector == 64 + 16


def test_a_host_is_needed(device, monkeypatch):
    def devices(name=None):
        raise RuntimeError(f"Unknown backend {name}")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(RuntimeError, match=f"needs a CPU beside {device}: set JAX_PLATFORMS={device},cpu"):
        Dense.haar(0, 16)


@pytest.mark.full
def test_pallas_is_not_imported():
    line = """
import sys, jax, jax.numpy as jnp, rqjax
from rqjax.core import platforms
platforms.PLATFORM.set("METAL")
x = jnp.ones((1, 40, 1, 64))
cache = rqjax.strategy("rotorquant", jax.random.key(0), 64).cache(1, 1, 64, window=0, sinks=0)
jax.jit(lambda cache, x: rqjax.dot_product_attention(x, x, x, cache))(cache, x)
print([name for name in sys.modules if name.startswith("jax") and "pallas" in name])
"""
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
