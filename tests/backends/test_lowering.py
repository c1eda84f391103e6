"""Kernels lower for CUDA on the jax that is installed, without a GPU and without its compiler.

This finds primitives, layouts and sizes of shared memory that Mosaic refuses; `test_compile` goes on from there.
"""

import jax
import pytest

import rqjax
from rqjax.backends import hopper_calls
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
        assert_lowers(*OF_VECTORS[name](n=n))


@pytest.mark.parametrize("n", [1, 9])
def test_any_number_of_vectors_lowers_with_a_quantizer_for_each_head(n):
    keys = jax.random.split(jax.random.key(0), 3)
    quantizers = jax.eval_shape(jax.vmap(lambda key: rqjax.rotorquant(key, 64, 3)), keys)
    x = jax.ShapeDtypeStruct((3, n, 64), "bfloat16")

    def there_and_back(quantizer, x):
        return hopper_calls.roundtrip(quantizer, x), hopper_calls.decode(quantizer, hopper_calls.encode(quantizer, x))

    assert_lowers(jax.vmap(there_and_back), (quantizers, x))


@pytest.mark.parametrize("name", [name for name in SHAPES if f"decode_attention {name}" in hopper.TESTED])
def test_attention_lowers_for_one_query_and_odd_numbers(name):
    assert_lowers(*attention(name, batch=3, heads=5, rows=1, tokens=128))


def assert_lowers(function, shapes):
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
