"""Kernels lower for CUDA on the jax that is installed, without a GPU and without its compiler.

This finds primitives, layouts and sizes of shared memory that Mosaic refuses; `test_compile` goes on from there.
"""

import jax
import pytest

from tests.tools import hopper
from tests.tools.hopper_attention_shapes import SHAPES
from tests.tools.hopper_shapes import OF_VECTORS, attention

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", hopper.TESTED)
def test_lowers_for_cuda(name):
    assert_lowers(*hopper.configurations()[name]())


@pytest.mark.parametrize("name", [name for name in hopper.TESTED if name in OF_VECTORS])
def test_any_number_of_vectors_lowers(name):
    """The interpreter's arrays are padded to whole tiles, a GPU's are not: its copies have to stop at any row.

    Copies into tiles of 8 rows raised at 9, 130 and 300 vectors in each of the 28 configurations of `OF_VECTORS`.
    """
    for n in (1, 7, 9, 130, 300):
        function, shapes = OF_VECTORS[name](n=n)
        assert_lowers(function, shapes)
    heads = jax.tree.map(lambda shape: jax.ShapeDtypeStruct((3, *shape.shape), shape.dtype), shapes)
    assert_lowers(jax.vmap(function), heads)


@pytest.mark.parametrize("name", [name for name in SHAPES if f"decode_attention {name}" in hopper.TESTED])
def test_attention_lowers_for_one_query_and_odd_numbers(name):
    assert_lowers(*attention(name, batch=3, heads=5, rows=1, tokens=128))


def assert_lowers(function, shapes):
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
