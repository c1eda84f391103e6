"""A file of today's format loads, and what is computed from it stays the same (`written/make.py`)."""

import jax
import numpy as np
import pytest

import rqjax
from tests.written import make

pytestmark = pytest.mark.full


def test_what_was_saved_says_the_same():
    """Results agree to a few roundings: other versions of jax sum in other orders."""
    *parts, expected = rqjax.load(make.FILE)
    for quantizer, codes in parts[0].values():
        again = jax.eval_shape(quantizer.encode, make.vectors(15, 8, make.DIM))
        assert [(a.shape, a.dtype) for a in jax.tree.leaves(again)] == [
            (a.shape, a.dtype) for a in jax.tree.leaves(codes)
        ]
    found = make.computed(*parts)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())
