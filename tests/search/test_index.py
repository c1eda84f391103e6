"""The search index: what it finds, how it changes, what it refuses, and itself on disk and on a mesh."""

import dataclasses
import itertools
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import rqjax
from experiments.data import samples
from rqjax import Index, metrics
from rqjax.search import filters, find, rough, rows as stored_rows, scan
from tests.tools.apple import formulated
from tests.tools.processes import on_devices
from tests.tools.suites import some

DIM = 64


def vectors(count=1000, seed=0):
    return np.array(samples.decaying_spectrum(jax.random.key(seed), count, DIM))


def quantizer(name="eden_unbiased", bits=4):
    """A quantizer with a key that no vectors have: random numbers that both share would not be independent."""
    return rqjax.METHODS[name](jax.random.key(100), DIM, bits)


@pytest.fixture(scope="module")
def index():
    return Index.build(quantizer(), vectors(), store=rqjax.Exact(DIM, "float16"))


def brute_force(x, queries, metric, k):
    """Scores and rows by brute force, for vectors that are stored exactly."""
    if metric == "cosine":
        x, queries = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, queries))
    scores = queries @ x.T
    if metric == "l2":
        scores = ((queries[:, None] - x) ** 2).sum(2)
    rows = np.argsort(scores if metric == "l2" else -scores, axis=1)[:, :k]
    return np.take_along_axis(scores, rows, axis=1), rows


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_exact_codes_find_what_brute_force_finds(metric):
    x, queries = vectors(), vectors(30, seed=1)
    scores, ids = Index.build(rqjax.Exact(DIM, "float32"), x, metric=metric).search(queries, 10)
    expected, rows = brute_force(x, queries, metric, 10)
    np.testing.assert_array_equal(ids, rows)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


SCORED = [("turboquant_mixed", "ip"), ("affine", "ip"), ("turboquant_prod", "l2")]
"""Cases with both metrics. Every method is tested in tests/scoring/test_products.py."""


@pytest.mark.parametrize(
    ("name", "metric"),
    some(SCORED, [("turboquant_prod", "l2")]),
)
def test_scores_are_those_of_the_decoded_vectors(name, metric):
    """Queries have 15 bits of their largest coordinate where levels are whole numbers."""
    x, queries, code = vectors(200), vectors(5, seed=1), quantizer(name)
    scores, ids = Index.build(code, x, metric=metric).search(queries, 20)
    decoded = code.decode(code.encode(x))
    products, energies = np.asarray(queries @ decoded.T), np.sum(x * decoded, axis=1)
    expected = np.take_along_axis(products, np.asarray(ids), axis=1)
    if metric == "l2":
        expected = (queries**2).sum(axis=1, keepdims=True) + energies[np.asarray(ids)] - 2 * expected
    np.testing.assert_allclose(scores, expected, atol=2e-3)
    best = np.sort(-products if metric == "ip" else energies - 2 * products, axis=1)[:, :20]
    found = -scores if metric == "ip" else scores - (queries**2).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.asarray(found), best, atol=2e-3)


@pytest.mark.full
def test_many_blocks_of_codes_and_queries_find_the_same(monkeypatch):
    x, queries = vectors(), vectors(37, seed=1)
    expected = Index.build(quantizer(), x).search(queries, 7)
    monkeypatch.setattr(scan, "QUERIES_TOGETHER", 8)
    monkeypatch.setattr(scan, "IN_CACHE", scan.IN_CACHE._replace(coordinates=48 * DIM))
    again = jax.jit(lambda index, queries: index.search(queries, 7))(Index.build(quantizer(), x), queries)
    for one, other in zip(expected, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
@pytest.mark.parametrize("count", [5000, 8191])
def test_the_best_of_groups_are_the_best(monkeypatch, count):
    """Many scores, most of them equal to others, in three blocks, the last of which overlaps the second."""
    monkeypatch.setattr(scan, "IN_CACHE", scan.IN_CACHE._replace(coordinates=3000 * DIM))
    x = np.repeat(vectors(count // 4 + 1), 4, axis=0)[:count]
    built = Index.build(rqjax.Exact(DIM, "float32"), x).remove(np.arange(count // 2, count // 2 + 100))
    products = np.where(np.asarray(built.rows.ids) < 0, -np.inf, vectors(70, seed=1) @ x.T)
    scores, ids = built.search(vectors(70, seed=1), 10)
    order = np.argsort(-products, axis=1, kind="stable")[:, :10]
    np.testing.assert_allclose(scores, np.take_along_axis(products, order, 1), rtol=1e-5, atol=1e-5)
    assert np.mean(np.asarray(ids) == order) > 0.99  # of equal vectors some have products that differ in the last bit
    assert (np.sort(ids, 1)[:, 1:] != np.sort(ids, 1)[:, :-1]).all()


@pytest.mark.parametrize("count", some((3, 70), [70]))
def test_rows_of_few_queries_are_gathered_at_a_time(monkeypatch, count):
    """The best are the same, and a program takes less memory: each query has 960 rows of 64 coordinates."""
    built, queries = Index.build(rqjax.Exact(DIM, "float32"), vectors(8000)), vectors(count, seed=1)
    found, bytes_of = [], []
    for gathered in (2**30, 1):
        monkeypatch.setattr(scan, "IN_CACHE", scan.IN_CACHE._replace(gathered=gathered, scores=2**16))
        search = jax.jit(lambda index, y: index.search(y, 30)).lower(built, queries).compile()
        found.append(search(built, queries))
        bytes_of.append(search.memory_analysis().temp_size_in_bytes)
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    assert bytes_of[1] < 0.7 * bytes_of[0]


@pytest.mark.parametrize("bits", some((1, 2, 3, 4), [3]))
@pytest.mark.parametrize("dim", some((13, 120), [120]))
def test_counted_products_are_nearly_those_of_the_levels(bits, dim):
    """Queries of 6 bits err by 0.03 of their deviation, and as much is left out of levels of 4 bits."""
    code = rqjax.lloyd_max(dim, bits)
    x, y = (np.random.default_rng(i).standard_normal((100, dim)).astype(np.float32) / dim**0.5 for i in range(2))
    codes = code.encode(x)
    assert rough.counted(code, 3)
    products = rough.rough(code, 3)
    found = products.scores(products.prepare(jnp.asarray(y[None, None, :3])), codes[None, None])[0, 0]
    expected = y[:3] @ np.asarray(code.decode(codes)).T
    assert np.std(found - expected) < 0.05 * np.std(expected)


@pytest.mark.full
@pytest.mark.parametrize("name", some(("eden_unbiased", "turboquant_mixed", "turboquant_prod"), ["turboquant_mixed"]))
def test_few_queries_find_what_many_find(name):
    """All but 3 of 1,000: rows are chosen by scores that are nearly right, and scored exactly."""
    x, queries = vectors(20_000), vectors(100, seed=1)
    built = Index.build(quantizer(name, 3), x, metric="l2").remove(np.arange(0, 20_000, 7))
    scores, ids = (np.asarray(a) for a in built.search(queries, 10))
    few = [built.search(queries[i : i + 5], 10) for i in range(0, 100, 5)]
    few_scores, few_ids = (np.concatenate([np.asarray(found[i]) for found in few]) for i in range(2))
    assert metrics.recall(few_ids, ids) > 0.997
    assert (few_ids % 7 != 0).all()
    np.testing.assert_allclose(few_scores, scores, atol=2e-3)


def test_of_equal_scores_the_first_row_comes_first():
    x = np.repeat(vectors(3), 50, axis=0)
    _, ids = Index.build(quantizer(), x).search(x[::50], 50)
    np.testing.assert_array_equal(ids, np.arange(150).reshape(3, 50))


@pytest.mark.full
def test_biased_scales_keep_the_order_of_distances():
    """A quantizer that shrinks every inner product to a half finds the nearest as one that does not."""
    x, queries = vectors(), vectors(100, seed=1)
    half = rqjax.Scaled(quantizer().inner, mode="unbiased")
    exact = brute_force(x, queries, "l2", 10)[1]

    def recall(code):
        return metrics.recall(np.asarray(Index.build(code, x, metric="l2").search(queries, 10)[1]), exact)

    assert recall(quantizer("eden", 2)) == pytest.approx(recall(quantizer("eden_unbiased", 2)), abs=0.02)
    assert recall(half) > 0.8


@pytest.mark.full
def test_reranking_finds_what_the_store_finds(index):
    x, queries = vectors(), vectors(100, seed=1)
    exact = brute_force(x, queries, "ip", 10)[1]
    low = Index.build(quantizer(bits=1), x, store=rqjax.Exact(DIM, "float16"))
    plain, again = (metrics.recall(np.asarray(low.search(queries, 10, rerank=r)[1]), exact) for r in (None, 200))
    assert plain < 0.6
    assert again > 0.98
    np.testing.assert_allclose(low.search(x[:1], 1, rerank=1)[0][0, 0], np.sum(x[0] ** 2), rtol=2e-3)
    bytes_of_store = low.nbytes - Index.build(quantizer(bits=1), x).nbytes
    assert bytes_of_store == len(x) * DIM * 2


@pytest.mark.parametrize("metric", ["ip", "l2", "cosine"])
def test_reranked_scores_are_those_of_the_store(metric):
    """Search finds what brute force finds, with an exact store and all as candidates; lengths differ for |x|^2."""
    x, queries = vectors(100) * np.linspace(0.5, 2, 100, dtype=np.float32)[:, None], vectors(5, seed=1)
    built = Index.build(quantizer(bits=2), x, metric=metric, store=rqjax.Exact(DIM, "float32"))
    scores, ids = built.search(queries, 20, rerank=100)
    expected, rows = brute_force(x, queries, metric, 20)
    np.testing.assert_array_equal(ids, rows)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    with formulated("gpu"):  # which takes many queries at once
        at_once = jax.jit(lambda index, y: index.search(y, 20, rerank=100))(built, queries)
    np.testing.assert_array_equal(at_once[1], ids)
    np.testing.assert_allclose(at_once[0], scores, rtol=1e-5, atol=1e-6)


def test_parts_of_vectors_are_encoded_to_the_rows_of_all(monkeypatch):
    """Three parts, the last of which overlaps the second."""
    monkeypatch.setattr(stored_rows, "ENCODED", 40 * DIM)
    x = vectors(100)
    built = Index.build(rqjax.Exact(DIM, "float32"), x, metric="l2", store=rqjax.Exact(DIM, "float16"))
    moved = x.astype(np.float32) - np.asarray(built.center)
    np.testing.assert_array_equal(built.rows.codes, moved)
    np.testing.assert_array_equal(built.rows.stored, moved.astype(np.float16))
    np.testing.assert_allclose(built.rows.energies, np.sum(moved**2, axis=1), rtol=1e-5)


@pytest.mark.full
def test_search_is_a_part_of_a_jitted_function(index):
    queries = vectors(6, seed=1)
    for function, arguments in ((lambda y: index.search(y, 3), (queries,)), (lambda: index.search(queries, 3), ())):
        np.testing.assert_array_equal(jax.jit(function)(*arguments)[1], index.search(queries, 3)[1])
    scores, ids = jax.jit(lambda index, y: index.search(2 * y, 3))(index, queries.reshape(2, 3, DIM))
    assert scores.shape == ids.shape == (2, 3, 3)
    expected = index.search(queries, 3)
    np.testing.assert_array_equal(ids.reshape(6, 3), expected[1])
    np.testing.assert_allclose(scores.reshape(6, 3), 2 * expected[0], rtol=1e-6)
    few = index.remove(np.arange(1, 1000))
    scores, ids = jax.jit(lambda index, y: index.search(y, 2))(few, queries[:1])
    assert ids.tolist() == [[0, -1]]
    assert scores[0, 1] == -jnp.inf


RANDOM = np.random.default_rng(0)
FILTERS = {
    "half of a mask": RANDOM.random(3000) < 0.5,
    "a short mask": np.ones(1200, bool),
    "many ids": RANDOM.permutation(3000)[:1500].astype(np.int64),
    "few ids": np.array([2998, 5, 2000, 5, 7, 2**31 - 1]),
    "a list": [1, 2, 3, *range(100, 140)],
    "a range": range(200, 2900, 3),
    "a range downwards": range(2**31 - 1, 5, -7),
    "a short range": range(40, 160),
    "none": [],
    "no range": range(0),
    "no mask": np.zeros(3000, bool),
}


@pytest.mark.parametrize(
    ("name", "metric"),
    some(
        zip(FILTERS, itertools.cycle(["cosine", "ip", "l2"]), strict=False),
        [("a short mask", "ip"), ("a range", "l2")],
    ),
)
def test_a_filter_finds_what_brute_force_finds_of_what_passes(name, metric):
    """Eagerly and under jit, by codes and by a store; where there is too little, `FREE` fills up."""
    x, queries, where = vectors(), vectors(5, seed=1), FILTERS[name]
    ids = np.random.default_rng(1).permutation(3000)[: len(x)]
    exact = {"metric": metric, "ids": ids}
    index = Index.build(rqjax.Exact(DIM, "float32"), x, store=rqjax.Exact(DIM, "float32"), **exact)
    index = index.remove(ids[::10])
    mask = isinstance(where, np.ndarray) and where.dtype == bool
    passing = np.flatnonzero(where) if mask else where
    left = np.array([i for i in range(len(x)) if i % 10 and int(ids[i]) in passing], int)
    scores, rows = brute_force(x[left], queries, metric, 20)
    missing = 20 - rows.shape[1]
    scores = np.pad(scores, ((0, 0), (0, missing)), constant_values=np.inf if metric == "l2" else -np.inf)
    expected = np.pad(ids[left][rows], ((0, 0), (0, missing)), constant_values=-1)
    as_argument = jax.jit(lambda index, y, where: index.search(y, 20, where=where))
    searches = [
        lambda: index.search(queries, 20, where=where),
        lambda: index.search(queries, 20, where=where, rerank=50),
        lambda: jax.jit(lambda y: index.search(y, 20, where=where))(queries),
    ]
    if not isinstance(where, range | list):
        searches.append(lambda: as_argument(index, queries, where))
    for search in searches:
        found = search()
        np.testing.assert_array_equal(found[1], expected)
        np.testing.assert_allclose(found[0], scores, rtol=1e-4, atol=1e-5)


def test_few_that_pass_are_searched_alone(index):
    """Scores are those of a search of all, and what is compiled is for a power of two of rows."""
    scores, ids = map(np.asarray, index.search(vectors(1, seed=1), 1000))
    few = np.sort(RANDOM.permutation(1000)[:200])
    some_scores, some_ids = index.search(vectors(1, seed=1), 200, where=few)
    np.testing.assert_array_equal(some_ids[0], ids[0][np.isin(ids[0], few)])
    np.testing.assert_allclose(some_scores[0], scores[0][np.isin(ids[0], few)], rtol=1e-5)
    sizes = [len(filters.narrowed(index.rows, few[:n].astype(np.int32), 1, 150)[0].ids) for n in (1, 3, 128, 129, 151)]
    assert sizes == [1, 4, 128, 256, 1000]


def test_the_bytes_are_those_of_the_codes_and_four_an_id():
    code = quantizer()
    built = Index.build(code, vectors())
    assert built.nbytes == 1000 * (code.bits_per_vector / 8 + 4) + rqjax.nbytes(code)
    assert Index.build(code, vectors(), metric="l2").nbytes == built.nbytes + 4000


@pytest.mark.full
def test_vectors_are_added_and_removed():
    x, queries = vectors(), vectors(20, seed=1)
    whole = Index.build(quantizer(), x)
    grown = Index.build(quantizer(), x[:0]).add(x[:300]).add(x[300:310]).add(x[310:])
    np.testing.assert_array_equal(grown.search(queries, 5)[1], whole.search(queries, 5)[1])
    without = whole.remove(np.arange(0, 1000, 2))
    assert len(without) == 500
    odd = Index.build(quantizer(), x[1::2], ids=np.arange(1, 1000, 2))
    np.testing.assert_array_equal(without.search(queries, 5)[1], odd.search(queries, 5)[1])
    again = without.add(x[::2], ids=np.arange(0, 1000, 2))
    assert again.nbytes == whole.nbytes  # the free rows are taken
    np.testing.assert_array_equal(again.search(queries, 5)[1], whole.search(queries, 5)[1])
    assert len(whole) == 1000
    np.testing.assert_array_equal(whole.remove(3).rows.ids, np.where(np.arange(1000) == 3, -1, np.arange(1000)))
    one = whole.remove(np.arange(999)).add(x[:1])  # ids follow the largest
    assert one.search(queries, 2)[1].max() == 1000


def test_rows_grow_by_an_eighth_at_least():
    whole = Index.build(quantizer(), vectors(800))
    sizes = []
    for i in range(3):
        whole = whole.add(vectors(1, seed=2 + i))
        sizes.append(len(whole.rows.ids))
    assert sizes == [900, 900, 900]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.search(vectors(2), 1001), "expected k to be a whole number from 1 to 1000, got 1001"),
        (lambda i: i.search(vectors(2), 0), "expected k to be a whole number from 1 to 1000, got 0"),
        (lambda i: i.search(vectors(2)[:, :63], 1), "expected vectors of dimension 64 along the last axis, got shape"),
        (lambda i: i.search(vectors(2) * np.nan, 1), "expected finite queries, got 128 NaN or Inf"),
        (lambda i: i.search(vectors(2).astype(int), 1), "expected vectors of a floating-point dtype"),
        (lambda i: i.search(vectors(2), 5, rerank=4), "expected rerank to be a whole number from 5 to 1000, got 4"),
        (lambda i: i.remove([3, 2000, 2001]), "2 ids are not in the index, the first is 2000"),
        (lambda i: i.remove([3, 3]), "expected different ids, got 1 more than once, the first is 3"),
        (lambda i: i.remove([0.5]), "expected ids that are whole numbers, got float64"),
        (lambda i: i.remove(np.arange(1000)).search(vectors(2), 1), "the index is empty"),
        (lambda i: i.add(vectors(2), ids=[5, 2000]), "1 ids are in the index already, the first is 5"),
        (lambda i: i.add(vectors(2), ids=[2000, 2000]), "expected different ids, got 1 more than once"),
        (
            lambda i: i.add(vectors(2), ids=np.array([2000, 2**63], np.uint64)),
            "expected ids from 0 to 2\\^63 - 1, got 2000 to 9223372036854775808",
        ),
        (lambda i: i.add(vectors(2), ids=[2000]), "expected 2 ids, got shape \\(1,\\)"),
        (lambda i: i.add(vectors(2)[:, :63]), "expected vectors \\(n, 64\\), got shape \\(2, 63\\)"),
        (lambda i: i.add(vectors(2) * np.inf), "expected finite vectors, got 2 with NaN or Inf, the first is vector 0"),
        (
            lambda i: i.add(vectors(3) + np.array([[0], [7e4], [0]], np.float32)),
            "expected vectors, got 1 too large for the codes, the first is vector 1",
        ),
        (lambda i: Index.build(quantizer(), vectors(), metric="dot"), "expected metric 'ip', 'l2' or 'cosine'"),
        (
            lambda i: Index.build(quantizer(), vectors(), store=rqjax.Exact(8)),
            "expected a store of dimension 64, got 8",
        ),
        (lambda i: Index.build(quantizer(), vectors()).search(vectors(2), 1, rerank=2), "an index with a store"),
        (lambda i: i.search(vectors(2), 1, where=[0.5]), "expected where to be booleans, whole numbers or a range"),
        (lambda i: i.search(vectors(2), 1, where=[3, -1]), "expected ids from 0 to 2\\^63 - 1, got -1 to 3"),
        (lambda i: i.search(vectors(2), 1, where=range(4, -3, -2)), "expected ids from 0 to 2\\^63 - 1, got -2 to 4"),
        (lambda i: i.search(vectors(2), 1, where=np.ones((2, 2), bool)), "where of shape \\(n,\\), got \\(2, 2\\)"),
        (lambda i: i.search(vectors(2), 1, where="all"), "expected an array of numbers, got one of <U3"),
        (lambda i: i.search(vectors(2), 1001, where=[3]), "expected k to be a whole number from 1 to 1000, got 1001"),
        (lambda i: i.shard(jax.sharding.Mesh(jax.devices()[:1], "x"), "y"), "expected an axis of the mesh \\(x\\)"),
    ],
)
def test_bad_input_is_one_error_and_leaves_the_index_as_it_was(index, change, message):
    before = [np.array(leaf) for leaf in jax.tree.leaves(index)]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        change(index)
    assert "\n" not in str(error.value)
    for leaf, was in zip(jax.tree.leaves(index), before, strict=True):
        np.testing.assert_array_equal(leaf, was)


def test_an_index_comes_back_from_disk(index, tmp_path):
    path, queries = tmp_path / "a.safetensors", vectors(20, seed=1)
    index.save(path)
    again = Index.load(path)
    assert jax.tree.structure(again) == jax.tree.structure(index)
    for one, other in zip(again.search(queries, 5, rerank=20), index.search(queries, 5, rerank=20), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(again.add(vectors(3))) == 1003


@pytest.mark.full
@pytest.mark.parametrize("metric", some(("ip", "l2", "cosine"), ["l2"]))
def test_rows_may_stay_in_the_file(metric, tmp_path, monkeypatch):
    """A mapped index is searched in parts; the last overlaps the one before. A store ranks the best of all parts."""
    monkeypatch.setattr(find, "IN_MEMORY", 300 * 42)
    path, queries = tmp_path / "a.safetensors", vectors(20, seed=1)
    built = Index.build(quantizer(), vectors(), metric=metric, store=rqjax.Exact(DIM, "float16"))
    built.remove(range(0, 1000, 9)).save(path)
    whole, mapped = Index.load(path), Index.load(path, mapped=True)
    assert all(isinstance(a, np.memmap) for a in jax.tree.leaves(mapped.rows))
    for where in (None, np.arange(100, 500), range(5)):
        for one, other in zip(
            mapped.search(queries, 9, where=where), whole.search(queries, 9, where=where), strict=True
        ):
            np.testing.assert_array_equal(one, other)
    for rerank in (9, 20, 888):
        (scores, ids), (expected, same) = (i.search(queries, 9, rerank=rerank) for i in (mapped, whole))
        np.testing.assert_array_equal(ids, same)
        np.testing.assert_allclose(scores, expected, rtol=1e-6, atol=1e-6)
    fewer = mapped.remove([1, 2])
    np.testing.assert_array_equal(fewer.search(queries, 3)[1], whole.remove([1, 2]).search(queries, 3)[1])
    content = bytearray(path.read_bytes())
    content[-99] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        Index.load(path, mapped=True)
    path.write_bytes(content[:-99])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        Index.load(path, mapped=True)


def test_files_that_hold_no_index_are_refused(index, tmp_path):
    path = tmp_path / "a.safetensors"
    index.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        Index.load(path)
    rqjax.save(quantizer(), path)
    with pytest.raises(ValueError, match=r"expected an Index in .*, found a Scaled"):
        Index.load(path)
    save_file({"x": vectors()}, path)
    with pytest.raises(ValueError, match="was not saved by this version"):
        Index.load(path)
    index.save(path)
    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(arrays, path, {**metadata, "format": "rqjax-tree-9"})
    with pytest.raises(ValueError, match="expected format 'rqjax-tree-4', got 'rqjax-tree-9'"):
        Index.load(path)


@pytest.mark.full
def test_a_kill_while_saving_leaves_a_whole_file(tmp_path):
    path = tmp_path / "a.safetensors"
    script = f"""
import numpy as np, rqjax
index = rqjax.Index.build(rqjax.Exact(256, "float32"), np.random.default_rng(0).normal(size=(20_000, 256)))
while True:
    index.save({str(path)!r})
    print("saved", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    while not list(tmp_path.glob(".a.*")):  # until it writes the next one
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(tmp_path.glob(".a.*"))
    assert len(Index.load(path)) == 20_000


@pytest.mark.full
@pytest.mark.parametrize("processes", [1, 2])
def test_a_mesh_finds_the_same(processes):
    """An index runs on 8 devices, in one process and in two that talk over the loopback device."""
    on_devices("tests/tools/mesh_search.py", processes)


@pytest.mark.full
@pytest.mark.parametrize("name", ["turboquant", "turboquant_trellis"])
def test_a_search_takes_memory_for_one_block(name):
    """Memory that a compiled search allocates grows by 8 bytes a vector at most, and the rest is below 64 MiB."""
    small = Index.build(quantizer(name), vectors(100))

    def temporaries(count):
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), small.rows)
        queries = jax.ShapeDtypeStruct((1000, DIM), jnp.float32)
        search = jax.jit(lambda rows, y: dataclasses.replace(small, rows=rows).search(y, 10))
        return search.lower(rows, queries).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(1_000_000), temporaries(2_000_000)  # from 100,000 on the best scores of groups fill a block
    assert few < 2**26
    assert many - few <= 8 * 1_000_000


@pytest.mark.parametrize(
    ("metric", "stored"), some([(m, s) for m in ("ip", "l2", "cosine") for s in (False, True)], [])
)
def test_no_queries_find_nothing_and_no_vectors_change_nothing(metric, stored, tmp_path):
    """Each kind of index does so, with filters, reranked, from a file, on a mesh."""
    x, store = vectors(300), rqjax.Exact(DIM, "float16") if stored else None
    index = Index.build(quantizer(), x, metric=metric, store=store)
    index.save(tmp_path / "i.safetensors")
    kinds = [
        index,
        Index.build(quantizer(), x, metric=metric, store=store, lists=5, key=jax.random.key(0)),
        index.shard(jax.sharding.Mesh(np.array(jax.devices()), ("rows",)), "rows"),
        Index.load(tmp_path / "i.safetensors", mapped=True),
    ]
    for kind in kinds:
        for shape in ((0, DIM), (3, 0, DIM)):
            for options in ({}, {"where": [1, 2, 3]}, {"where": range(0)}, {"rerank": 10} if stored else {}):
                scores, ids = kind.search(np.zeros(shape, np.float32), 3, **options)
                assert (scores.shape, scores.dtype) == ((*shape[:-1], 3), np.float32)
                assert (ids.shape, ids.dtype) == ((*shape[:-1], 3), np.int32)
    for kind in kinds[:2]:
        same = kind.add(x[:0]).remove([]).add(x[:0], ids=[])
        for found, expected in zip(same.search(x[:2], 3), kind.search(x[:2], 3), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert len(kind.remove(np.arange(300)).add(x[:9])) == 9
