"""Ids beyond 32 bits: they go in and come back exactly, with no option of jax."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import rqjax
from rqjax import Index
from tests.tools.suites import some

DIM, KEY = 16, jax.random.key(0)
LISTS = {"lists": 5, "key": KEY}
X = np.random.default_rng(0).standard_normal((400, DIM)).astype(np.float32)
IDS = np.random.default_rng(1).permutation(400) * 2**33 + np.arange(400) % 3 * 2**31 + np.arange(400) - 1 + 2**40
IDS[:4] = 2**63 - 1, 0, 2**31 - 1, 2**32 - 1  # the largest, and halves that are FREE


def built(x=X, ids=IDS, **options):
    return Index.build(rqjax.Exact(DIM, "float32"), x, ids=ids, **options)


CASES = [("l2", {}), ("l2", LISTS), ("cosine", {}), ("ip", LISTS)]


@pytest.mark.parametrize(("metric", "options"), some(CASES, CASES[:1]))
def test_large_ids_are_those_of_small_ones(metric, options, tmp_path):
    """Searches, filters, removal, files and rows given back agree with an index of the same rows with ids 0 to 399."""
    probes = {"probes": 5} if options else {}
    small, large = built(ids=None, metric=metric, **options), built(ids=IDS, metric=metric, **options)
    assert small.rows.ids.nbytes * 2 == large.rows.ids.nbytes == 3200
    large.save(tmp_path / "index")
    cases = {
        "all": (None, None),
        "few": ([2, 3, 50], IDS[[2, 3, 50]]),
        "some": (np.arange(0, 400, 2), [*IDS[::2].tolist(), 2**50 - 1]),
        "none": ([], [5, 2**34 + 1]),
        "one": ([0], range(2**63 - 1, 2**63 - 2, -1)),
        "range": (np.flatnonzero((IDS >= 2**41) & (IDS % 3 == 2**41 % 3)), range(2**41, 2**63 - 1, 3)),
        "mask": ([1], [True]),
        "int32": ([1, 2], np.asarray([0, 2**31 - 1, 7], np.int32)),
    }
    for where, same in cases.values():
        for index in (
            large,
            Index.load(tmp_path / "index"),
            *([] if options else [Index.load(tmp_path / "index", mapped=True)]),
        ):
            expected, rows = small.search(X[:9], 20, where=where, **probes)
            scores, ids = index.search(X[:9], 20, where=same, **probes)
            assert ids.dtype == np.int64
            np.testing.assert_array_equal(ids, np.where(rows == -1, -1, IDS[rows]))
            np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    _, _, of_range = large.range_search(X[:3], 1.0, **probes)
    np.testing.assert_array_equal(of_range, IDS[small.range_search(X[:3], 1.0, **probes)[2]])
    np.testing.assert_array_equal(large.reconstruct(IDS[::7]), small.reconstruct(np.arange(0, 400, 7)))
    np.testing.assert_array_equal(large.searcher(3, **probes)(X[:2])[1], large.search(X[:2], 3, **probes)[1])
    store = {"store": rqjax.Exact(DIM, "float16"), "metric": metric, **options}
    ranked = [built(ids=ids, **store).search(X[:9], 5, rerank=20, **probes)[1] for ids in (None, IDS)]
    np.testing.assert_array_equal(IDS[ranked[0]], ranked[1])
    less = large.remove(IDS[:100].tolist())
    assert len(less) == 300
    assert not np.isin(less.search(X, 50, **probes)[1], IDS[:100]).any()
    with pytest.raises(ValueError, match=f"1 ids are not in the index, the first is {2**63 - 1}"):
        less.reconstruct([2**63 - 1])
    np.testing.assert_array_equal(
        less.add(X[:100], ids=IDS[:100]).search(X, 1, **probes)[1], large.search(X, 1, **probes)[1]
    )


@pytest.mark.parametrize("options", [{}, LISTS], ids=["rows", "lists"])
def test_ids_grow_beyond_32_bits(options):
    """Rows keep ids of 32 bits until one is beyond, given or the next; then all are in halves."""
    probes = {"probes": 5} if options else {}
    index = built(ids=np.arange(400) + 2**31 - 401, metric="l2", **options)
    assert index.search(X[:1], 1, where=range(2**40), **probes)[1].dtype == np.int32
    assert index.search(X[7:8], 1, where=[2**40, 2**31 - 401], **probes)[1].item() == 2**31 - 401
    more = index.add(X[:3] + 9).add(X[3:5] + 9, ids=[3, 2**40])
    y = np.concatenate([X[:2], X[:5] + 9])
    expected = [2**31 - 401, 2**31 - 400, 2**31 - 1, 2**31, 2**31 + 1, 3, 2**40]
    assert more.search(y, 1, **probes)[1].ravel().tolist() == expected
    with pytest.raises(ValueError, match=f"1 ids are in the index already, the first is {2**40}"):
        more.add(X[:2], ids=[1, 2**40])
    with pytest.raises(ValueError, match="from 0 to 2\\^63 - 1, got 9223372036854775808 to"):
        more.add(X[:2], ids=[2**63, 2**63 + 1])
    with pytest.raises(ValueError, match="different ids, got 1 more than once"):
        built(ids=np.append(IDS[:399], IDS[0]))


def test_under_jit_ids_are_halves():
    """Halves are joined by NumPy. Ids of 32 bits may be filtered and halves be added."""
    index = built(metric="l2")
    halves = jax.jit(lambda i, y: i.search(y, 5, where=range(2**31))[1])(index, X[:3])
    assert (halves.dtype, halves.shape) == (np.int32, (3, 5, 2))
    found = np.asarray(halves).view(np.int64)[..., 0]
    np.testing.assert_array_equal(found, index.search(X[:3], 5, where=range(2**31))[1])
    with pytest.raises(ValueError, match="expected where= of ids below 2\\^31 under jit"):
        jax.jit(lambda i, y: i.search(y, 5, where=[2**40]))(index, X[:3])
    new = np.array([9, 2**50]).view(np.int32).reshape(2, 2)
    for start in (built(metric="l2", room=2), built(metric="l2", ids=None, room=2)):
        more = jax.jit(lambda i, x, ids: i.add(x, ids=ids))(start, X[:2] + 9, new)
        assert more.search(X[:2] + 9, 1)[1].ravel().tolist() == [9, 2**50]
        assert jax.jit(lambda i, x: i.add(x, ids=[9, 2**50]))(start, X[:2]).reconstruct([2**50]).shape == (1, DIM)
    with pytest.raises(ValueError, match="expected ids= to add to ids beyond 32 bits under jit"):
        jax.jit(lambda i, x: i.add(x))(index, X[:2])


def test_under_x64_traced_ids_may_be_large():
    before = jax.config.jax_enable_x64
    try:
        jax.config.update("jax_enable_x64", True)
        new = np.array([500, 2**50])
        more = jax.jit(lambda i, x, ids: i.add(x, ids=ids))(built(metric="l2", ids=None, room=2), X[:2] + 9, new)
        assert more.search(X[:2] + 9, 1)[1].ravel().tolist() == [500, 2**50]
        found = jax.jit(lambda i, y, where: i.search(y, 2, where=where)[1])(more, X[:1], new)
        assert np.asarray(found).view(np.int64).ravel().tolist() == [500, -1]
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("options", [{}, LISTS], ids=["rows", "lists"])
def test_a_mesh_keeps_large_ids(options):
    probes = {"probes": 5} if options else {}
    index = built(metric="l2", **options)
    shards = index.shard(Mesh(np.array(jax.devices()), "rows"), "rows")
    for where in (None, IDS[:200], range(2**40, 2**63 - 1, 3), [False, True]):
        found, expected = (i.search(X[:9], 20, where=where, **probes)[1] for i in (shards, index))
        np.testing.assert_array_equal(found, expected)
    assert len(shards) == 400


@pytest.mark.parametrize("options", some([{}, LISTS], [{}]), ids=["rows", "lists"])
def test_ids_end(options):
    """None follow 2^63 - 1; under jit, where rows keep 32 bits, vectors beyond 2^31 - 1 are left out."""
    index = built(X[:9], np.arange(9) + (2**63 - 12), metric="l2", **options)
    full = index.add(X[9:12])
    np.testing.assert_allclose(full.reconstruct([2**63 - 1, 2**63 - 3]), X[[11, 9]], rtol=1e-5, atol=1e-5)
    assert len(full.add(X[:0])) == 12
    for start, count in ((full, 1), (index, 4)):
        with pytest.raises(ValueError, match=f"expected ids= for {count} vectors"):
            start.add(X[:count])
    assert len(full.add(X[:1], ids=[5])) == 13
    index = built(X[:9], np.arange(9) + (2**31 - 11), metric="l2", room=6, **options)
    more = jax.jit(lambda index, x: index.add(x))(index, X[9:13])
    ids = np.asarray(more.rows.ids)
    assert sorted(ids[ids >= 0].tolist()) == list(range(2**31 - 11, 2**31))
    assert (len(more), ids.min()) == (11, -1)
    np.testing.assert_allclose(more.reconstruct([2**31 - 1]), X[10:11], rtol=1e-5, atol=1e-5)
