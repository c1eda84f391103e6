"""Derivatives with respect to quantizers, and quantizers on a mesh by `jax.shard_map` as users call it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import rqjax
from tests.tools.apple import formulated
from tests.tools.suites import some


@pytest.mark.parametrize("name", some(["eden", "turboquant_trellis_unbiased"], ["eden"]))
def test_a_round_trip_has_a_gradient_for_every_array_of_a_quantizer(name):
    """It is that of other devices, where nothing is computed in loops to be stored."""
    floats, made = rqjax.parameters(rqjax.METHODS[name](jax.random.key(0), 32, 3))
    x = jax.random.normal(jax.random.key(1), (5, 32))

    def gradient():
        loss = lambda floats, x: jnp.sin(rqjax.roundtrip(made(floats), x)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(floats, x)

    found = gradient()
    with formulated("gpu"):
        expected = gradient()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(b).max()) > 0.1
        np.testing.assert_allclose(a, b, atol=1e-4 * float(jnp.abs(b).max()))


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="from jax 0.6 on")
@pytest.mark.parametrize(
    ("name", "count"), some([("turboquant_trellis", 40), ("eden", 40_000), ("nested_e8", 5000)], [("eden", 40_000)])
)
def test_shards_are_encoded_and_scored_as_the_whole(name, count):
    """Loops begin with arrays that vary over the mesh as those that they end with."""
    mesh, along = Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec("d")
    quantizer = rqjax.METHODS[name](jax.random.key(0), 64, 2)
    x, y = jax.random.normal(jax.random.key(1), (count, 64)), jax.random.normal(jax.random.key(2), (2, 64))

    def both(x):
        codes = quantizer.encode(x)
        return codes, quantizer.dot(y, codes)

    specs = {"mesh": mesh, "in_specs": along, "out_specs": (along, PartitionSpec(None, "d"))}
    found, expected = jax.jit(jax.shard_map(both, **specs))(x), jax.jit(both)(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_a_product_of_many_codes_in_shards():
    quantizer = rqjax.FITTED["pq"](jax.random.key(0), jax.random.normal(jax.random.key(1), (300, 16)), 2)
    codes = quantizer.encode(jax.random.normal(jax.random.key(1), (300, 16)))
    if hasattr(jax, "shard_map"):
        specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec(None, "d")}
        mapped = jax.shard_map(
            lambda codes: quantizer.dot(jnp.ones((2, 16)), codes),
            mesh=Mesh(np.array(jax.devices()[:1]), ("d",)),
            **specs,
        )
        np.testing.assert_allclose(jax.jit(mapped)(codes), quantizer.dot(jnp.ones((2, 16)), codes), rtol=1e-5)
