"""Decoders on a mesh of devices against the same on one."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rqjax.core.mesh import along
from rqjax.nn import load_decoder
from tests.nn.test_decoder import CHECKPOINTS, through_caches
from tests.tools import mesh_decoder

MESH = Mesh(np.array(jax.devices()[:1]), "heads")


def test_a_mesh_of_one_device():
    expected = np.load(CHECKPOINTS / "llama" / "logits.npz")
    logits = through_caches(load_decoder(CHECKPOINTS / "llama", mesh=MESH), expected["tokens"], "float32", [])
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


def test_devices_are_no_mesh():
    with pytest.raises(TypeError, match=r"expected a jax.sharding.Mesh of devices, got \["):
        along(jax.devices(), "heads")


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mesh_makes_the_same(processes, tmp_path):
    """8 devices, in one process and in two that talk over the loopback device."""
    mesh_decoder.write(tmp_path)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={8 // processes} --xla_backend_optimization_level=0"
    runs = [
        subprocess.Popen(
            [sys.executable, "tests/tools/mesh_decoder.py", *map(str, (tmp_path, processes, rank, port))],
            env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": "."},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    for run in runs:
        out, error = run.communicate(timeout=900)
        assert run.returncode == 0, error
        assert "the same" in out
