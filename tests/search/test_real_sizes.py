"""Searches of 5,000 vectors against exact ones in float64: every metric, near the origin and far from it."""

import jax
import numpy as np
import pytest

import rqjax
from rqjax import Index
from tests.tools import neighbors
from tests.tools.suites import some

COUNT = 5000
KEY = jax.random.key(0)


def vectors(dim, offset):
    """Vectors, and queries a hundredth of their spread beside the first ones."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((COUNT, dim)) + offset).astype(np.float32)
    return x, (x[:20] + 0.01 * rng.standard_normal((20, dim))).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "metric", "dim", "k", "offset"),
    some(
        [
            (kind, metric, dim, k, offset)
            for kind in ("rows", "lists")
            for metric in ("ip", "l2", "cosine")
            for dim in (96, 384)
            for k in (10, 100)
            for offset in ((0, 100, 1000) if metric == "l2" else (0,))
        ],
        [("rows", "l2", 96, 100, 1000)],
    ),
)
def test_vectors_as_they_are_are_found_as_by_float64(kind, metric, dim, k, offset):
    """Vectors found are as near as the nearest; of equal distances in float32 either may come first."""
    x, queries = vectors(dim, offset)
    options = {"key": KEY, "lists": 8} if kind == "lists" else {}
    scores, ids = Index.build(rqjax.Exact(dim, "float32"), x, metric=metric, **options).search(queries, k)
    expected, _ = neighbors.nearest(x, queries, metric, k)
    scale = np.abs(neighbors.scores(x, queries, metric)).max()
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6 * scale)
    there = np.take_along_axis(neighbors.scores(x, queries, metric), np.asarray(ids), axis=1)
    np.testing.assert_allclose(there, expected, rtol=1e-5, atol=1e-6 * scale)
    assert all(len(set(row)) == k for row in np.asarray(ids).tolist())


@pytest.mark.parametrize(
    ("kind", "offset"),
    some([(k, o) for k in ("rows", "lists", "store") for o in (0, 10, 100, 1000)], [("rows", 1000)]),
)
def test_near_duplicates_far_from_the_origin(kind, offset):
    """Codes of 8 bits of what is left of a center or a centroid: as good as near the origin."""
    dim, k = 96, 10
    x, queries = vectors(dim, offset)
    code = rqjax.eden(KEY, dim, 8)
    options: dict = {"metric": "l2"}
    if kind == "store":
        options["store"] = rqjax.Exact(dim, "float32")
    options |= {"key": KEY, "lists": 8} if kind == "lists" else {}
    built = Index.build(code, x, **options)
    search = {"rerank": 50} if kind == "store" else {}
    scores, ids = map(np.asarray, built.search(queries, k, **search))
    distances = neighbors.scores(x, queries, "l2")
    _, rows = neighbors.nearest(x, queries, "l2", k)
    assert (scores >= 0).all()
    assert (ids[:, 0] == rows[:, 0]).all()
    assert rqjax.metrics.recall(ids, rows) > (0.999 if kind == "store" else 0.975)
    tolerance = {"rtol": 1e-3} if kind == "store" else {"atol": 1.0}
    np.testing.assert_allclose(scores, np.take_along_axis(distances, ids, axis=1), **tolerance)


@pytest.mark.full
def test_the_center_belongs_to_the_index(tmp_path):
    """An offset stays with what is added later, on disk, in a mapped file, and on a mesh; some codes have none."""
    dim = 96
    x, queries = vectors(dim, 1000)
    whole = Index.build(rqjax.Exact(dim, "float32"), x, metric="l2")
    grown = Index.build(rqjax.Exact(dim, "float32"), x[:2000], metric="l2").add(x[2000:])
    grown.save(tmp_path / "i.safetensors")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    _, rows = whole.search(queries, 10)
    for other in (
        grown,
        Index.load(tmp_path / "i.safetensors"),
        Index.load(tmp_path / "i.safetensors", mapped=True),
        grown.shard(mesh, "rows"),
    ):
        scores, ids = other.search(queries, 10)
        np.testing.assert_array_equal(ids, rows)
        np.testing.assert_allclose(scores, neighbors.nearest(x, queries, "l2", 10)[0], rtol=1e-5, atol=1e-4)
    assert Index.build(rqjax.Exact(dim), x[:0], metric="l2").center is None
    assert Index.build(rqjax.Exact(dim), x[:9]).center is None
