"""Files that older code wrote load, and what is computed from them stays the same (`written/make.py`)."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.suites import SEEN, some
from tests.written import make

pytestmark = pytest.mark.full

RESULTS = np.load(make.FOLDER / "results.npz")
OTHERS = {*make.STRATEGIES, *make.METRICS, "training"}
QUANTIZERS = sorted({name.rpartition("/")[0] for name in RESULTS.files} - OTHERS - SEEN)


def same(name, *arrays):
    """To a few roundings: other versions of jax sum in other orders."""
    for i, array in enumerate(arrays):
        expected = RESULTS[f"{name}/{i}"]
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.fixture(scope="module")
def quantizers():
    pairs = rqjax.load(make.FOLDER / "quantizers.safetensors")
    return {name: (quantizer, codes) for name, quantizer, codes in pairs}


@pytest.mark.parametrize("name", some(QUANTIZERS, ["qjl", "turboquant_prod", "affine_rotated_sign", "lopq_budget"]))
def test_quantizers_and_codes(quantizers, name):
    quantizer, codes = quantizers[name]
    x = make.vectors(15, 8, make.DIM)
    x = jnp.stack([x, x]) if name == "heads" else x
    decoded = jax.jit(rqjax.decode)(quantizer, codes)
    same(name, decoded)
    again = jax.jit(rqjax.encode)(quantizer, x)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(codes), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
    # Of two levels or centroids as near as each other, either may be taken.
    errors = [((x - y) ** 2).sum(axis=-1) for y in (jax.jit(rqjax.decode)(quantizer, again), decoded)]
    np.testing.assert_allclose(*errors, rtol=1e-4)


@pytest.mark.parametrize("name", some(make.STRATEGIES, ["v2_rotated_qjl"]))
def test_caches(name):
    cache = rqjax.load(make.FOLDER / f"cache-{name.replace('/', '-')}.safetensors")
    same(name, *make.attended(cache))


@pytest.mark.parametrize("metric", some(make.METRICS, ["l2"]))
def test_indexes(metric):
    index = rqjax.Index.load(make.FOLDER / f"index-{metric}.safetensors")
    same(metric, *index.search(make.vectors(16, 2, make.DIM), 5, rerank=10))


@pytest.mark.full
def test_a_training_under_way(tmp_path):
    file = tmp_path / "training.safetensors"
    shutil.copy(make.FOLDER / "training.safetensors", file)
    rows = []
    same("training", make.training(file, rows.append).inner.rotation.bivectors)
    assert [row["step"] for row in rows] == [15, 20]
