"""Vectors that have a mean: codes are relative to it, and what they lose is measured against brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import Index
from rqjax.search import centers
from rqjax.search.centers import Around
from tests.tools import neighbors
from tests.tools.suites import some

DIM, COUNT = 64, 2000
KEY = jax.random.key(0)
LISTS = {"lists": 8, "key": jax.random.key(1)}


def decoded(built, x):
    """Decodes vectors as defined: a center, the gain times what is left, and a part that makes the center's exact."""
    x, code = np.asarray(x, np.float64), built.quantizer
    if built.metric == "cosine":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    if built.lists:
        centroids = np.asarray(code.centroids, np.float64)
        center = centroids[((x[:, None] - centroids) ** 2).sum(2).argmin(1)]
    else:
        center = np.broadcast_to(np.asarray(code.center, np.float64), x.shape)
    inner, left = code.inner, jnp.asarray(x, jnp.float32) - jnp.asarray(center, jnp.float32)
    near = float(code.gain) * np.asarray(inner.decode(inner.encode(left)), np.float64)
    lost = np.sum((x - center - near) * center, axis=1, keepdims=True) / np.sum(center**2, axis=1, keepdims=True)
    return center + near + lost * center


@pytest.mark.parametrize(
    ("metric", "options", "name", "queries"),
    some(
        [
            (metric, options, name, count)
            for metric in ("ip", "cosine")
            for options in ({}, LISTS)
            for name, count in (("eden", 3), ("eden", 50), ("turboquant_trellis", 3), ("turboquant_prod", 50))
        ],
        [("ip", {}, "eden", 3)],
    ),
)
def test_scores_are_those_of_vectors_whose_centers_are_exact(metric, options, name, queries):
    x, y = neighbors.around_a_mean(10)
    y = y[:queries]
    built = Index.build(rqjax.METHODS[name](KEY, DIM, 2), x, metric=metric, **options)
    scores, ids = built.search(y, 20, **({"probes": 8} if options else {}))
    directions = y / np.linalg.norm(y, axis=1, keepdims=True) if metric == "cosine" else y
    products = directions @ decoded(built, x).T
    np.testing.assert_allclose(scores, np.take_along_axis(products, np.asarray(ids), 1), rtol=3e-4)
    best = np.sort(-products, axis=1)[:, :20]
    np.testing.assert_allclose(scores, -best, rtol=3e-4)


@pytest.mark.full
@pytest.mark.parametrize("metric", ["ip", "cosine", "l2"])
def test_every_kind_of_index_finds_the_same(metric, tmp_path):
    """Vectors that are added later, files that stay where they are, meshes, jit and filters."""
    x, y = neighbors.around_a_mean(10)
    built = Index.build(rqjax.eden_unbiased(KEY, DIM, 4), x, metric=metric)
    half = built.remove(range(1, COUNT, 2))
    half.add(x[1::2], ids=np.arange(1, COUNT, 2)).save(tmp_path / "i.safetensors")
    expected = built.search(y, 10)
    for other in (
        Index.load(tmp_path / "i.safetensors"),
        Index.load(tmp_path / "i.safetensors", mapped=True),
        built.shard(jax.sharding.Mesh(np.array(jax.devices()), "rows"), "rows"),
    ):
        found = other.search(y, 10)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
        assert rqjax.metrics.recall(found[1], expected[1]) > 0.99
    np.testing.assert_array_equal(jax.jit(lambda i, y: i.search(y, 10))(built, y)[1], expected[1])
    few = built.search(y, 10, where=np.asarray(expected[1])[0])
    np.testing.assert_array_equal(few[1][0], expected[1][0])
    ivf = Index.build(rqjax.eden_unbiased(KEY, DIM, 4), x, metric=metric, **LISTS)
    scores, ids = map(np.asarray, ivf.search(y[:1], 30, probes=8))
    alone = ivf.search(y[:1], 10, where=ids[0, 1::3])  # scored apart from their lists
    np.testing.assert_array_equal(alone[1], ids[:, 1::3])
    np.testing.assert_allclose(alone[0], scores[:, 1::3], rtol=1e-4)


@pytest.mark.parametrize("metric", some(["ip", "cosine", "l2"], ["ip"]))
def test_a_function_fits_a_quantizer_to_what_a_center_leaves(metric, monkeypatch):
    """A mean is subtracted where it has a tenth of the energy, and for distances."""
    monkeypatch.setattr(centers, "LEARNED", 300)
    for ratio in (0, 3):
        x, seen = neighbors.around_a_mean(ratio)[0], []
        built = Index.build(lambda x, seen=seen: seen.append(x) or rqjax.eden(KEY, DIM, 2), x, metric=metric)
        sample = x[np.linspace(0, COUNT - 1, 300).astype(int)]
        sample = sample / np.linalg.norm(sample, axis=1, keepdims=True) if metric == "cosine" else sample
        (fitted_to,) = seen
        if ratio or metric == "l2":
            np.testing.assert_allclose(built.origin, sample.mean(axis=0), rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(fitted_to, sample - sample.mean(axis=0), rtol=1e-3, atol=1e-4)
        else:
            assert built.origin is None
            np.testing.assert_allclose(fitted_to, sample, rtol=1e-5, atol=1e-6)
        assert len(built.search(x[:3], 5)[1]) == 3


def test_a_center_is_subtracted_where_it_pays():
    """Not near the origin, not of a handful, and not of vectors that are kept as they are."""
    code = rqjax.eden(KEY, DIM, 2)
    (near, _), (far, _) = neighbors.around_a_mean(0), neighbors.around_a_mean(3)
    for metric in ("ip", "l2"):
        assert Index.build(code, near, metric=metric).origin is None
        np.testing.assert_allclose(Index.build(code, far, metric=metric).origin, far.mean(axis=0), rtol=1e-3, atol=1e-4)
    assert Index.build(code, np.eye(DIM, dtype=np.float32)).origin is None
    assert Index.build(code, far[:0]).origin is None
    assert Index.build(rqjax.Exact(DIM, "float16"), far).origin is None
    given = Index.build(rqjax.Centered(jnp.ones(DIM), code), far)
    assert isinstance(given.quantizer, Around)
    np.testing.assert_array_equal(given.origin, np.ones(DIM))
    assert (Index.build(code, far, metric="l2").search(far[:5], 3)[0] >= 0).all()
