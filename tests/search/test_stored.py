"""Things that people store: bytes, files, ranges, vectors given back, and indexes that grow under jit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import Index
from rqjax.search import find, ranges
from tests.tools import neighbors
from tests.tools.suites import some

DIM = 32
KEY = jax.random.key(0)
LISTS = {"lists": 7, "key": KEY}


def vectors(count=600, seed=0):
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.mark.parametrize(
    ("metric", "options", "dtype"),
    some(
        [
            *(("ip", {}, np.int8), ("l2", {}, np.float16), ("cosine", {}, np.uint8)),
            *(("ip", LISTS, np.uint8), ("l2", LISTS, np.int8), ("cosine", LISTS, np.float16)),
        ],
        [("cosine", {}, np.uint8)],
    ),
)
def test_small_numbers_are_searched_as_float32(metric, options, dtype, tmp_path):
    """Bytes in a mapped file find what brute force finds of their values; queries may be bytes, too."""
    x = np.random.default_rng(0).integers(0, 120, (600, DIM)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    built = Index.build(
        rqjax.Exact(DIM, "float32"), np.load(tmp_path / "x.npy", mmap_mode="r"), metric=metric, **options
    )
    built = built.remove([5]).add(x[5:6], ids=[5])
    queries = x[:9] // 2 + 1
    scores, ids = built.search(queries, 10, **({"probes": 7} if options else {}))
    expected, rows = neighbors.nearest(x, queries, metric, 10)
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    assert rqjax.metrics.recall(ids, rows) > 0.97  # of whole numbers some distances are equal


@pytest.mark.full
def test_parts_of_bytes_are_converted_one_at_a_time(monkeypatch):
    """No part of more than `ENCODED` coordinates is read, and none is converted on the host."""
    monkeypatch.setattr("rqjax.search.rows.ENCODED", 100 * DIM)
    read = []

    class File(np.ndarray):
        def __getitem__(self, key):
            part = np.asarray(super().__getitem__(key))
            read.append((len(part), part.dtype))
            return part

    x = np.random.default_rng(0).integers(0, 200, (600, DIM)).astype(np.uint8)
    index = Index.build(rqjax.eden(KEY, DIM, 4), x.view(File))
    assert len(index) == 600
    assert set(read) == {(100, np.dtype(np.uint8))}


@pytest.mark.parametrize(
    ("metric", "options"), some([(m, o) for m in ("ip", "l2", "cosine") for o in ({}, LISTS)], [("l2", {})])
)
def test_a_range_holds_all_within_a_radius(metric, options):
    """Hundreds for some queries, none for others."""
    x = vectors() * np.linspace(0.2, 2, 600)[:, None].astype(np.float32)
    queries = np.concatenate([vectors(4, seed=1), x[:1] * (100 if metric == "l2" else 0.001)])
    built = Index.build(rqjax.Exact(DIM, "float32"), x, metric=metric, **options).remove(np.arange(0, 600, 7))
    scores = neighbors.scores(x, queries, metric)
    radius = np.quantile(scores, 0.6)
    bounds, found, ids = built.range_search(queries, radius, **({"probes": 7} if options else {}))
    assert (bounds[0], len(bounds), bounds[-1]) == (0, 6, len(ids))
    for i, row in enumerate(scores):
        within = np.flatnonzero((row < radius if metric == "l2" else row > radius) & (np.arange(600) % 7 > 0))
        mine = ids[bounds[i] : bounds[i + 1]]
        assert len(np.setxor1d(mine, within)) <= 1  # on the edge
        np.testing.assert_allclose(found[bounds[i] : bounds[i + 1]], row[mine], rtol=1e-4, atol=1e-4)
    assert [len(a) for a in built.range_search(queries[:0], radius)] == [1, 0, 0]
    some_bounds, _, few = built.range_search(queries, radius, where=[1, 2, 7])
    assert set(few) <= {1, 2}
    assert some_bounds[-1] == len(few)


@pytest.mark.parametrize("metric", some(("ip", "l2", "cosine"), ["ip"]))
def test_ranges_of_many_queries_are_found_for_some_at_a_time(metric, monkeypatch):
    """No search is for more than `TOGETHER` vectors, but for one query."""
    x, queries = vectors(), vectors(9, seed=1)
    built = Index.build(rqjax.Exact(DIM, "float32"), x, metric=metric)
    radius = np.quantile(neighbors.scores(x, queries, metric), 0.3)
    expected = built.range_search(queries, radius)
    search, sizes = Index.search, []

    def watched(index, y, k, **options):
        sizes.append(len(y) * k if len(y) > 1 else 1)
        return search(index, y, k, **options)

    monkeypatch.setattr(Index, "search", watched)
    monkeypatch.setattr(ranges, "TOGETHER", 150)
    found = built.range_search(queries, radius)
    assert max(sizes) == 2 * ranges.FIRST
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)
    for first, last in zip(found[0], found[0][1:], strict=False):
        assert set(found[2][first:last]) == set(expected[2][first:last])
    within = neighbors.scores(x, queries, metric)
    within = within < radius if metric == "l2" else within > radius
    assert np.abs(np.diff(found[0]) - within.sum(axis=1)).max() <= 1  # on the edge


@pytest.mark.parametrize(
    ("metric", "stored"), some([(m, s) for m in ("ip", "l2", "cosine") for s in (False, True)], [("l2", True)])
)
def test_a_search_of_a_file_takes_memory_for_a_part(metric, stored, tmp_path, monkeypatch):
    """Parts are of so many bytes, with a store or without; of a store rows of candidates alone are read."""
    monkeypatch.setattr(find, "IN_MEMORY", 5000)
    store = rqjax.Exact(DIM, "float32") if stored else None
    built = Index.build(rqjax.eden(KEY, DIM, 4), vectors() + 1, metric=metric, store=store).remove(range(0, 600, 9))
    built.save(tmp_path / "i.safetensors")
    mapped = Index.load(tmp_path / "i.safetensors", mapped=True)
    assert (mapped.nbytes, built.nbytes_in_file) == (built.nbytes, 0)
    assert mapped.nbytes_in_file == rqjax.nbytes(mapped.rows)
    assert mapped.remove([1]).nbytes_in_file == mapped.nbytes_in_file - 4 * 600
    read = {"codes": [], "stored": []}

    def watched(array, name):
        class File(np.ndarray):
            def __getitem__(self, key):
                part = np.asarray(super().__getitem__(key))
                read[name].append(part.nbytes)
                return part

        return array.view(File)

    parts = {name: jax.tree.map(lambda a, name=name: watched(a, name), getattr(mapped.rows, name)) for name in read}
    mapped = dataclasses.replace(mapped, rows=dataclasses.replace(mapped.rows, **parts))
    y = vectors(6, seed=1) + 1
    for options in ({}, {"where": range(50, 580)}, *([{"rerank": 20}] if stored else [])):
        (scores, ids), (expected, same) = (i.search(y.reshape(2, 3, DIM), 7, **options) for i in (mapped, built))
        np.testing.assert_array_equal(ids, same)
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
        assert sum(read["stored"]) == (6 * 20 * 4 * DIM if "rerank" in options else 0)
    assert len(read["codes"]) >= 2 * 4 * len(jax.tree.leaves(mapped.rows.codes))
    assert max(read["codes"] + read["stored"]) <= 5000
    with pytest.raises(ValueError, match="expected queries and a filter outside jit for an index whose rows are in"):
        jax.jit(lambda y: mapped.search(y, 7))(y)
    with pytest.raises(ValueError, match="expected an index in memory for prepared searches"):
        mapped.searcher(7)


@pytest.mark.parametrize(("metric", "options"), some([(m, o) for m in ("ip", "l2", "cosine") for o in ({}, LISTS)], []))
def test_vectors_come_back(metric, options, tmp_path):
    """Ids may have any order; vectors come from the codes and from a store, far from the origin, from a mapped file."""
    x, ids = vectors() + 3, np.random.default_rng(1).permutation(5000)[:600]
    wanted = x / np.linalg.norm(x, axis=1, keepdims=True) if metric == "cosine" else x
    store = rqjax.Exact(DIM, "float32")
    coded = Index.build(rqjax.eden(KEY, DIM, 8), x, ids=ids, metric=metric, **options)
    stored = Index.build(rqjax.eden(KEY, DIM, 1), x, ids=ids, metric=metric, store=store, **options)
    few = ids[[7, 3, 3, 599, 0]]
    found = coded.remove(ids[20:40]).reconstruct(few)
    error = np.linalg.norm(found - wanted[[7, 3, 3, 599, 0]], axis=1)
    assert (error < 0.02 * np.linalg.norm(wanted[[7, 3, 3, 599, 0]], axis=1)).all()
    np.testing.assert_allclose(stored.reconstruct(few), wanted[[7, 3, 3, 599, 0]], rtol=1e-5, atol=1e-5)
    assert coded.reconstruct([]).shape == (0, DIM)
    if not options:
        coded.save(tmp_path / "i.safetensors")
        np.testing.assert_array_equal(Index.load(tmp_path / "i.safetensors", mapped=True).reconstruct(few), found)


@pytest.mark.parametrize(("metric", "options"), some([("ip", {}), ("cosine", {}), ("l2", LISTS)], []))
def test_a_prepared_search_finds_the_same(metric, options):
    """One query after another, many at once, bytes, reranked, and with vectors added since, as if it were not so."""
    index = Index.build(rqjax.eden(KEY, DIM, 2), vectors() + 1, metric=metric, store=rqjax.Exact(DIM), **options)
    choice = {"rerank": 40, **({"probes": 3} if options else {})}
    shards = index.shard(jax.sharding.Mesh(np.array(jax.devices()), "rows"), "rows")
    queries, finds = vectors(9, seed=1), [i.searcher(7, **choice) for i in (index, shards)]
    index.add(vectors(1, seed=2))
    for y in (queries[0], queries, queries.reshape(3, 3, DIM), queries[:0], (queries[:1] * 9).astype(np.int8)):
        for search in finds:
            for found, expected in zip(search(y), index.search(y, 7, **choice), strict=True):
                assert found.shape == expected.shape
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_compiled_function_adds_vectors():
    """A step of fixed shapes adds to free rows, and leaves out what there is no room for."""
    x, code = vectors(), rqjax.eden(KEY, DIM, 4)
    built = Index.build(code, x[:590], metric="l2", room=8)
    step = jax.jit(lambda index, x: index.add(x))
    grown = step(step(built, x[590:594]), x[594:598])
    assert (len(built), len(grown), len(grown.rows.ids)) == (590, 598, 598)
    whole = Index.build(code, x[:598], metric="l2")
    for found, expected in zip(grown.search(x[:5], 9), whole.search(x[:5], 9), strict=True):
        np.testing.assert_array_equal(found, expected)
    full = step(grown.remove([3, 4]), x[:4])
    assert len(full) == 598
    assert sorted(np.asarray(full.rows.ids)[[3, 4]]) == [598, 599]
    named = jax.jit(lambda index, x, ids: index.add(x, ids=ids))(built, x[590:592], jnp.array([9000, 7000]))
    np.testing.assert_array_equal(np.asarray(named.rows.ids)[-8:], [9000, 7000, *[-1] * 6])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.range_search(vectors(2), np.nan), "expected radius to be a number, got nan"),
        (lambda i: i.range_search(vectors(2), "1"), "expected radius to be a number, got '1'"),
        (lambda i: i.range_search(vectors(2)[0], 1), r"expected queries \(m, 32\) outside jit, got shape \(32,\)"),
        (lambda i: jax.jit(lambda i: i.range_search(vectors(2), 1))(i), r"expected queries \(m, 32\) outside jit"),
        (lambda i: i.searcher(600), "expected k to be a whole number from 1 to 599, got 600"),
        (lambda i: i.searcher(5, probes=2), "expected an index with lists to look into"),
        (lambda i: i.searcher(5, rerank=9), "expected an index with a store"),
        (lambda i: i.searcher(5)(vectors(1)[:, :9]), "expected vectors of dimension 32 along the last axis"),
        (lambda i: i.searcher(5)(vectors(1) * np.nan), "expected finite queries, got 32 NaN or Inf"),
        (lambda i: i.reconstruct([5, 700]), "1 ids are not in the index, the first is 700"),
        (lambda i: i.reconstruct([-1]), "1 ids are not in the index, the first is -1"),
        (lambda i: i.reconstruct([0.5]), "expected ids that are whole numbers, got float64"),
        (lambda i: i.add(vectors(2).astype(np.int32)), "of a floating-point dtype, int8 or uint8, got int32"),
        (lambda i: i.add(vectors(2) > 0), "of a floating-point dtype, int8 or uint8, got bool"),
        (lambda i: Index.build(i.quantizer, vectors(2), room=-1), "expected room to be a whole number from 0"),
        (lambda i: Index.build(lambda x: None, vectors(9)), "a function that returns a quantizer, got None of it"),
        (lambda i: Index.build(lambda x: i.quantizer, vectors(1)), "expected at least 2 vectors to fit a quantizer to"),
        (lambda i: Index.build(lambda x: i.quantizer, vectors()[0]), r"expected vectors \(n, d\), got shape \(32,\)"),
        (
            lambda i: Index.build(lambda x: rqjax.strategy("kivi_2", KEY, DIM).keys, vectors(99)),
            "expected codes of one vector each, got those of 32 vectors together",
        ),
        (
            lambda i: Index.build(lambda x: i.quantizer, vectors(9), store=rqjax.Exact(8)),
            "expected a store of dimension 32, got 8",
        ),
    ],
)
def test_bad_input_is_one_line(change, message):
    index = Index.build(rqjax.eden(KEY, DIM, 4), vectors()).remove([3])
    with pytest.raises((ValueError, TypeError), match=message) as error:
        change(index)
    assert "\n" not in str(error.value)
