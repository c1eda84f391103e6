"""Caches as other engines see them."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import rqjax
from rqjax.core.pytree import without_derived
from rqjax.nn.opaque import empty_caches
from tests.tools.apple import formulated


@pytest.mark.parametrize("name", ["eden_4+turned", "eden_3/v2_lean+centered", "eden_4"])
@pytest.mark.parametrize("where", [contextlib.nullcontext, functools.partial(formulated, "gpu", capability="9.0")])
def test_a_cache_comes_back_whole(name, where):
    """All leaves have the batch in front, and quantizers and mean are where they were."""
    rope, strategy = rqjax.Rope(1e4), rqjax.strategy(name, jax.random.key(0), 64)
    with where():
        cache = strategy.cache(3, 2, 300, rope=rope)
        opaque = empty_caches([strategy], [rope], [None], [2], {})(3, 300)["layer_0"]
    assert {leaf.shape[0] for leaf in jax.tree.leaves(opaque)} == {3}
    jax.tree.map(np.testing.assert_array_equal, *map(without_derived, (opaque.cache, cache)))
