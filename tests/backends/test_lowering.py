"""Kernels lower for CUDA on the jax that is installed, without a GPU and without its compiler.

This finds primitives, layouts and sizes of shared memory that Mosaic refuses; `test_compile` goes on from there.
"""

import jax
import pytest

from tests.tools import hopper

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", hopper.TESTED)
def test_lowers_for_cuda(name):
    function, shapes = hopper.configurations()[name]()
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
