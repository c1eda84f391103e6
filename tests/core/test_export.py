"""`jax.export` writes functions of the library's pytrees, and what is read computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import rqjax
from tests.tools.suites import some

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (40, 32))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def cache(name, **options):
    return rqjax.strategy(name, KEY, 32).cache(1, 1, 256, **options)


CASES = {
    "recipe": lambda: (lambda q, x: (q, q.encode(x)), rqjax.turboquant_prod(KEY, 32, 3), X),
    "trellis": lambda: (lambda q, x: q.encode(x), rqjax.turboquant_trellis(KEY, 32, 2.5), X),
    "fitted": lambda: (lambda q, x: q.dot(x, q.encode(x)), rqjax.klt_trellis(KEY, X, 2), X),
    "index": lambda: (
        lambda index, y: index.search(y, 3),
        rqjax.Index.build(rqjax.eden(KEY, 32, 2), X, metric="l2", store=rqjax.Exact(32)),
        X[:3],
    ),
    "inverted file": lambda: (
        lambda ivf, y: ivf.search(y, 3),
        rqjax.Index.build(rqjax.eden(KEY, 32, 2), X, key=KEY, lists=3),
        X[:3],
    ),
    "rope": lambda: (lambda rope, x: (rope, rope(x, jnp.arange(40))), rqjax.Rope.parse(1e4, YARN), X),
    "strategy": lambda: (lambda strategy: strategy, rqjax.strategy("eden_4+centered", KEY, 32)),
    "cache": lambda: (lambda cache: cache, cache("kivi_2/float8+centered")),
    "cache with a rope": lambda: (lambda cache: cache, cache("eden_4+pre_rope", rope=rqjax.Rope.parse(1e4, YARN))),
}


@pytest.mark.parametrize("case", some(CASES, ["recipe", "rope", "cache with a rope"]))
def test_what_is_exported_computes_the_same(case):
    function, *args = CASES[case]()
    expected = jax.jit(function)(*args)
    again = export.deserialize(export.export(jax.jit(function))(*args).serialize()).call(*args)
    assert jax.tree.structure(again) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_export_rejects_static_fields_that_are_no_literals():
    @rqjax.pytree
    class Held:
        array: jax.Array
        of: object = rqjax.static()

    exported = export.export(jax.jit(lambda held: held.array))(Held(jnp.ones(2), len))
    with pytest.raises(ValueError, match=r"expected numbers and texts to export in a Held, got \(<built-in"):
        exported.serialize()
