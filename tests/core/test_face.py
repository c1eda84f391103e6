"""Interactive use: names, short reprs, sizes before anything is made, gradients through rounding."""

import importlib.metadata
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import METHODS
from tests.tools.suites import distinct, some

KEY = jax.random.key(0)


def test_version_and_names():
    assert rqjax.__version__ == importlib.metadata.version("rqjax")
    assert all(hasattr(rqjax, name) for name in rqjax.__all__)
    assert len(set(rqjax.__all__)) == len(rqjax.__all__)
    map_of_names = {word for word in re.findall(r"\w+", rqjax.__doc__) if hasattr(rqjax, word)}
    assert map_of_names - {"nn"} == set(rqjax.__all__)
    lines = repr(rqjax.METHODS).splitlines()
    assert len(lines) == len(rqjax.METHODS)
    assert repr(rqjax.BUDGETED).splitlines() == list(rqjax.BUDGETED)  # settings, not functions
    assert "eden: TurboQuant-mse with the best scale per vector: EDEN." in lines
    assert ">>> q = rqjax.eden(" in rqjax.eden.__doc__


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: rqjax.rotorquant(KEY, 128, 3), "Normalized(Rotated(Rotor(128), Scalar(3 bits)))"),
        (lambda: rqjax.eden_unbiased(KEY, 64, 2), "Scaled(Rotated(Dense(64), Scalar(2 bits)), mode='unbiased')"),
        (lambda: rqjax.affine(KEY, 128, 4), "Affine(4 bits, group_size=64)"),
        (lambda: rqjax.turboquant_mixed(KEY, 64, 2.5).inner.inner, "Split(Scalar(3 bits), Scalar(2 bits))"),
        (lambda: rqjax.rotor_chain(KEY, 64, 1).inner.rotation, "Chain(Rotor(64), Hadamard(64))"),
        (lambda: rqjax.Exact(8, "float16"), "Exact(8, dtype='float16')"),
        (lambda: rqjax.turboquant_trellis(KEY, 64, 3).inner.inner.table, "Companded(float32[], multiplier=97)"),
        (
            lambda: rqjax.strategy("v3_3", KEY, 64).cache(1, 2, 512, window=16),
            "KVCache(Normalized(Rotated(Dense(64), Scalar(3 bits))), AsGiven(), max_len=512, window=16, sinks=4)",
        ),
        (
            lambda: rqjax.Index.build(rqjax.identity(KEY, 4, 3), np.eye(4, dtype=np.float32)),
            "Index(Normalized(Scalar(3 bits)), metric='ip')",
        ),
        (
            lambda: rqjax.Index.build(rqjax.identity(KEY, 4, 3), np.eye(4, dtype=np.float32), lists=2, key=KEY),
            "Index(Cells(Normalized(Scalar(3 bits))), metric='ip')",
        ),
    ],
)
def test_reprs_are_short(made, expected):
    assert repr(made()) == expected


@pytest.mark.parametrize("name", ["eden_4", "v2_rotated_qjl+centered", "float32", "bfloat16/v3_2"])
def test_bytes_are_known_before_a_cache_is_made(name):
    strategy = rqjax.strategy(name, KEY, 64)
    assert strategy.nbytes(2, 2, 300, window=16) == strategy.cache(2, 2, 300, window=16).nbytes


def test_a_float32_cache_is_float32_throughout():
    dtypes = {name: rqjax.strategy(name, KEY, 64).cache(1, 1, 64).exact_keys.dtype.name for name in ("float32", "eden")}
    assert dtypes == {"float32": "float32", "eden": "bfloat16"}


@pytest.mark.full
def test_gradients_go_straight_through():
    x, weights = jax.random.normal(KEY, (20, 64)), jax.random.normal(jax.random.key(1), (20, 64))
    q = rqjax.eden(KEY, 64, 4)
    np.testing.assert_allclose(rqjax.straight_through(q, x), rqjax.roundtrip(q, x), atol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(weights * rqjax.straight_through(q, x))))(x)
    np.testing.assert_allclose(gradient, weights, rtol=1e-6)
    assert rqjax.straight_through(q, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.full
@pytest.mark.parametrize("name", some(distinct(METHODS), ["eden", "rotorquant", "rotorquant_trellis"]))
def test_whole_quantizers_have_gradients(name):
    """Quantizers have gradients without `allow_int`, though they hold integers; rebuilt ones decode to the same."""
    x, q = jax.random.normal(KEY, (20, 64)), METHODS[name](KEY, 64, 4)
    if not jax.tree.leaves(q):  # levels of its own for each vector, and nothing random
        assert name == "affine"
        return
    params, rebuild = rqjax.parameters(q)
    np.testing.assert_array_equal(rebuild(params).decode(q.encode(x)), q.decode(q.encode(x)))
    gradients = jax.jit(jax.grad(lambda params: jnp.sum(rqjax.straight_through(rebuild(params), x) ** 2)))(params)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert any(np.any(gradient != 0) for gradient in gradients)


@pytest.mark.full
def test_a_layer_with_rounded_weights_trains():
    """Training with rounded weights ends within 3 % of the loss in float, at 4 bits (2.0 to 2.5 for twelve
    rotations)."""
    x, true = jax.random.normal(KEY, (512, 64)), jax.random.normal(jax.random.key(1), (64, 16)) / 8
    y = x @ true + jax.random.normal(jax.random.key(2), (512, 16))
    q = rqjax.eden(jax.random.key(3), 64, 4)

    def loss(weights, rounded):
        weights = rqjax.straight_through(q, weights.T).T if rounded else weights
        return jnp.mean((x @ weights - y) ** 2)

    @jax.jit
    def trained(rounded):
        def step(weights, _):
            return weights - 0.3 * jax.grad(loss)(weights, True), None

        return jax.lax.scan(step, jnp.zeros((64, 16)), None, 200)[0]

    best, _, _, _ = jnp.linalg.lstsq(x, y)
    assert loss(trained(True), True) < 1.03 * loss(best, False)
