"""Random keys: data drawn from a quantizer's own key is data like any other, and which values are taken for a key."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.core.random import as_key
from rqjax.recipes.strategies import for_layers
from tests.tools.suites import some

D, N = 64, 1000
KEYS = {
    "key": lambda key: key,
    "first half": lambda key: jax.random.split(key)[0],
    "second half": lambda key: jax.random.split(key)[1],
    "of one head": lambda key: jax.random.split(key, 1)[0],
    "of the first layer": lambda key: jax.random.fold_in(key, 0),
}
"""Keys of data, derived from the quantizer's."""


def relative_error(quantizer, x):
    return float(jnp.sum((quantizer.decode(quantizer.encode(x)) - x) ** 2) / jnp.sum(x**2))


@pytest.mark.parametrize("name", some(rqjax.METHODS, ["eden", "turboquant_prod", "affine_rotated"]))
def test_data_of_a_recipes_key_has_the_error_of_other_data(name):
    key = jax.random.key(0)
    quantizer = rqjax.METHODS[name](key, D, 4)
    other = relative_error(quantizer, jax.random.normal(jax.random.key(1), (N, D)))
    for of, derived in KEYS.items():
        assert relative_error(quantizer, jax.random.normal(derived(key), (N, D))) == pytest.approx(other, rel=0.1), of


@pytest.mark.full
@pytest.mark.parametrize("name", some(["klt_joint", "rotorquant_allocated_trellis", "pq", "qet"], ["pq"]))
def test_data_of_a_fits_key_has_the_error_of_other_data(name):
    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (2 * N, 16))
    quantizer = rqjax.FITTED[name](key, x, 2)
    other = relative_error(quantizer, jax.random.normal(jax.random.key(2), (N, 16)))
    for of, derived in KEYS.items():
        assert relative_error(quantizer, jax.random.normal(derived(key), (N, 16))) == pytest.approx(other, rel=0.1), of


def test_strategies_of_layers():
    key = jax.random.key(0)
    errors = [
        relative_error(strategy.keys, jax.random.normal(k, (N, D)))
        for i, strategy in enumerate(for_layers("eden_4", key, 2, D))
        for k in (key, jax.random.fold_in(key, i), jax.random.key(1))
    ]
    np.testing.assert_allclose(errors, errors[-1], rtol=0.1)


def test_inverted_file():
    key = jax.random.key(0)
    x = {of: jax.random.normal(derived(key), (N, D)) for of, derived in KEYS.items()}
    x["another"] = jax.random.normal(jax.random.key(1), (N, D))
    coarse = {of: rqjax.Index.build(rqjax.Exact(D), data, key=key, lists=8).quantizer for of, data in x.items()}
    left = {of: float(jnp.sum((q.centroids[q.encode(x[of])[0]] - x[of]) ** 2)) for of, q in coarse.items()}
    np.testing.assert_allclose(list(left.values()), left["another"], rtol=0.05)


def test_no_module_but_random_draws():
    """Networks draw their first weights and the next tokens, which no rotation meets."""
    root = Path(rqjax.__file__).parent
    drawn = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"jax\.random\.(?!key\b|key_data\b|key_impl\b|split\b|fold_in\b|wrap_key_data\b)\w+\(", line)
        and not re.match(r"\s*(>>>|\.\.\.)", line)
    }
    assert drawn == {"nn/layers.py", "nn/sampling.py"}


@pytest.mark.parametrize("key", [0, np.int64(0), np.zeros((), int), jax.random.PRNGKey(0), np.zeros(2, np.uint32)])
def test_seeds_and_numbers_of_keys_are_keys(key):
    made, expected = (rqjax.rotor_chain(k, D, 2) for k in (key, jax.random.key(0)))
    for leaf, right in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(leaf, right)


@pytest.mark.parametrize("key", [None, 0.5, "0", True, np.zeros(2, np.float32)])
def test_as_key_rejects_other_values(key):
    with pytest.raises(TypeError, match=r"^expected a random key, such as jax\.random\.key\(0\), or a seed, got .*$"):
        as_key(key)


def test_several_keys():
    with pytest.raises(ValueError, match=r"^expected one random key, got an array of shape \(2,\)$"):
        as_key(jax.random.split(jax.random.key(0)))
