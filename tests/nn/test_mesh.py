"""Decoders on a mesh of devices give what they give on one."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rqjax
from rqjax.core.mesh import along
from rqjax.nn import heads, load_decoder
from tests.nn.test_decoder import CHECKPOINTS, through_caches
from tests.tools import mesh_decoder
from tests.tools.processes import on_devices
from tests.tools.suites import some

MESH = Mesh(np.array(jax.devices()[:1]), "heads")


@pytest.mark.parametrize("family", some(["phi3", "glm4", "mixtral", "gpt_oss"], ["phi3", "gpt_oss"]))
def test_a_mesh_of_one_device(family):
    """Several parameters of phi3 and glm4 lie in one tensor, and rows of glm4's turn side by side."""
    expected = np.load(CHECKPOINTS / family / "logits.npz")
    logits = through_caches(load_decoder(CHECKPOINTS / family, mesh=MESH), expected["tokens"], "float32", [])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("mesh", "axis", "message"),
    [
        (MESH, "rows", r"expected an axis of the mesh \(heads\), got 'rows'"),
        (Mesh(MESH.devices[None], ("a", "b")), None, r"expected an axis of the mesh \(a, b\), got None"),
        (
            Mesh(MESH.devices.repeat(3), "x"),
            None,
            "expected num_key_value_heads to be a multiple of the 3 devices, got 2",
        ),
    ],
)
def test_wrong_meshes(mesh, axis, message):
    with pytest.raises(ValueError, match=message):
        load_decoder(CHECKPOINTS / "llama", mesh=mesh, axis=axis)


def test_heads_with_codes_together_are_on_one_device():
    """Two heads of one group, and two devices."""
    quantizer = rqjax.AcrossHeads(rqjax.eden(jax.random.key(0), 64, 3), group=2)
    sharding = NamedSharding(Mesh(MESH.devices.repeat(2), "x"), PartitionSpec("x"))
    with pytest.raises(ValueError, match="expected a multiple of 2 groups of heads with codes together, got 1"):
        heads.empty(lambda: rqjax.KVCache.init(1, 2, 256, quantizer, quantizer), sharding)


def test_predictions_of_values_lie_with_their_heads():
    each = rqjax.PerHead(jax.vmap(lambda key: rqjax.eden(key, 64, 3))(jax.random.split(jax.random.key(0), 2)))
    quantizer = rqjax.AcrossHeads(each, group=2)
    cache = rqjax.KVCache.init(1, 4, 256, quantizer, rqjax.GivenKeys(quantizer, prediction=jax.numpy.ones((2, 64, 64))))
    laid = heads.specs(cache, "x").own_value_quantizer
    assert laid.prediction == PartitionSpec("x")
    assert set(jax.tree.leaves(laid.inner)) == {PartitionSpec("x")}


def test_devices_are_no_mesh():
    with pytest.raises(TypeError, match=r"expected a jax.sharding.Mesh of devices, got \["):
        along(jax.devices(), "heads")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    mesh_decoder.write(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mesh_makes_the_same(processes, decoders):
    """Decoders run on 8 devices, in one process and in two that talk over the loopback device."""
    on_devices("tests/tools/mesh_decoder.py", processes, decoders, timeout=900)
