"""Constants of the attention kernels in a cache: they follow its quantizers, wherever it goes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import rqjax
from rqjax.nn import heads
from tests.tools import hopper
from tests.tools.apple import formulated

pytestmark = pytest.mark.skipif(not hopper.has_kernels(), reason="this jax has no kernels")

on_hopper = functools.partial(formulated, "gpu", capability="9.0")


def empty(name="eden_4", seed=0):
    return rqjax.strategy(name, jax.random.key(seed), 64).cache(1, 2, 300)


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_only_caches_with_such_a_kernel_have_constants():
    rope = rqjax.Rope(1e4)
    assert empty().constants is None
    with on_hopper():
        assert empty().constants.queries.shape == (1, 64, 64)
        assert empty("nested_e8_3").constants is None
        turned = rqjax.strategy("eden_4+turned", jax.random.key(0), 64).cache(1, 2, 300, rope=rope)
        assert turned.constants.queries.shape == (1, 64, 64)
    with formulated("gpu", capability="8.0"):
        assert empty().constants is None


def test_they_are_made_anew_with_the_quantizers():
    with on_hopper():
        other = rqjax.strategy("v2_lean", jax.random.key(1), 64)
        again = rqjax.requantize(empty("v2_lean"), other)
        assert_equal(again.constants, other.cache(1, 2, 300).constants)
        assert_equal(rqjax.grow(again, 600).constants, again.constants)
        before = rqjax.strategy("eden_4+pre_rope", jax.random.key(1), 64)
        grown = rqjax.grow(before.cache(1, 2, 300, rope=rqjax.Rope(1e4)), 600)
        assert_equal(grown.constants, before.cache(1, 2, 768, rope=rqjax.Rope(1e4)).constants)
    assert rqjax.requantize(again, other).constants is None


def test_files_leave_them_out(tmp_path):
    with on_hopper():
        cache, other = empty(), empty(seed=1)
    plain, made = tmp_path / "plain.safetensors", tmp_path / "made.safetensors"
    rqjax.save(empty(), plain)
    rqjax.save([cache], made)
    assert rqjax.load(made)[0].constants is None
    assert rqjax.load(made, [other])[0].constants is None
    with on_hopper():
        for loaded in (rqjax.load(plain), rqjax.load(plain, other), *rqjax.load(made), *rqjax.load(made, [other])):
            assert_equal(loaded.constants, cache.constants)


def test_they_lie_with_their_heads():
    def make(key):
        quantizer = rqjax.PerHead(jax.vmap(lambda key: rqjax.METHODS["affine_rotated"](key, 64, 4))(key))
        return rqjax.KVCache.init(1, 4, 300, quantizer, rqjax.eden(key[0], 64, 4))

    with on_hopper():
        cache = jax.eval_shape(make, jax.random.split(jax.random.key(0), 4))
    specs = heads.specs(cache, "x").constants
    assert (specs.queries, specs.groups) == (PartitionSpec("x"),) * 2
    assert {*jax.tree.leaves((specs.values, specs.tables), is_leaf=lambda x: isinstance(x, PartitionSpec))} == {
        PartitionSpec()
    }


@pytest.mark.full
def test_gradients_pass_them_by():
    def loss(scale):
        with on_hopper():
            cache = rqjax.strategy("eden_4", jax.random.key(0), 64).cache(1, 2, 300)
            quantizer = jax.tree.map(lambda x: x * scale if x.dtype == jnp.float32 else x, cache.key_quantizer)
            cache = rqjax.KVCache.init(1, 2, 300, quantizer, quantizer)
        x = jnp.ones((1, 5, 2, 64))
        return rqjax.attend(rqjax.append(cache, x * scale, x), x[:, -1:], implementation="xla").sum()

    assert np.isfinite(jax.grad(loss)(1.0))


@pytest.mark.full
def test_a_cache_without_them_attends_alike():
    from pallas_kernels.gpu import mosaic
    from rqjax.backends import hopper as backend

    with on_hopper():
        cache = empty()
    x = jax.random.normal(jax.random.key(1), (2, 1, 200, 2, 64))
    cache, q = rqjax.append(cache, *x), x[0, :, :1]
    token = backend.INTERPRET.set(mosaic.interpret())
    attend = functools.partial(rqjax.attend, q=q, implementation="mosaic_gpu")
    found, bare = attend(cache), attend(dataclasses.replace(cache, constants=None))
    backend.INTERPRET.reset(token)
    np.testing.assert_allclose(found, bare, atol=1e-6)  # matrices are rounded as XLA fuses them
