"""Inverted files: what the nearest lists hold, filters, how they change, what they refuse, and themselves on disk."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from experiments.data import samples
from rqjax import Index
from rqjax.search import centers, probe, together
from tests.search.test_index import brute_force
from tests.tools.suites import some

DIM, LISTS = 16, 12
EXACT = rqjax.Exact(DIM, "float32")


def vectors(count=600, seed=0):
    return np.array(samples.clustered(jax.random.key(seed), count, DIM)) * np.linspace(0.7, 1, count)[:, None]


def build(quantizer=EXACT, x=None, **options):
    return Index.build(
        quantizer, vectors() if x is None else x, **{"key": jax.random.key(9), "lists": LISTS, **options}
    )


@pytest.fixture(scope="module")
def ivf():
    return build(store=EXACT)


def in_lists(ivf, x, queries, probes):
    """Returns which vectors are in the lists that each query looks into."""
    centroids = np.asarray(ivf.quantizer.centroids)
    if ivf.metric == "cosine":
        x, queries = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, queries))
    if ivf.metric == "l2":
        x, queries = x - ivf.center, queries - ivf.center
    own = ((x[:, None] - centroids) ** 2).sum(2).argmin(axis=1)
    near = queries @ centroids.T - ((centroids**2).sum(1) / 2 if ivf.metric == "l2" else 0)
    return (np.argsort(-near, axis=1)[:, :probes, None] == own).any(axis=1)


def expected_of(ivf, x, queries, k, probes, passes=True):
    scores, rows = brute_force(x, queries, ivf.metric, len(x))
    allowed = np.take_along_axis(in_lists(ivf, x, queries, probes) & passes, rows, axis=1)
    order = np.argsort(~allowed, axis=1, kind="stable")[:, :k]
    there = np.take_along_axis(allowed, order, axis=1)
    worst = np.inf if ivf.metric == "l2" else -np.inf
    return (
        np.where(there, np.take_along_axis(scores, order, axis=1), worst),
        np.where(there, np.take_along_axis(rows, order, axis=1), -1),
    )


def assert_same(found, expected):
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("metric", "residual", "probes"),
    some(
        [
            *(("l2", True, 5), ("ip", True, 1), ("cosine", True, LISTS)),
            *(("l2", False, LISTS), ("ip", False, 5), ("cosine", False, 1)),
        ],
        [("l2", True, 5)],
    ),
)
def test_search_equals_brute_force_in_the_nearest_lists(metric, residual, probes, monkeypatch):
    """Few and many queries, in parts of lists, whose numbers do not come out even."""
    monkeypatch.setattr(probe, "LEAST_ROWS", 16)
    monkeypatch.setattr(probe, "MOST_ROWS", 16)
    x, queries = vectors(), vectors(40, seed=1)
    ivf = build(metric=metric, residual=residual, store=EXACT)
    assert_same(ivf.search(queries, 30, probes=probes), expected_of(ivf, x, queries, 30, probes))
    assert_same(ivf.search(queries[:1], 5, probes=probes), expected_of(ivf, x, queries[:1], 5, probes))
    assert_same(ivf.search(queries[:1], 5, probes=probes, rerank=9), expected_of(ivf, x, queries[:1], 5, probes))


@pytest.mark.full
@pytest.mark.parametrize("name", ["turboquant_trellis", "affine"])
def test_scores_are_those_of_the_decoded_vectors(name):
    x, queries = vectors(), vectors(40, seed=1)
    ivf = build(rqjax.METHODS[name](jax.random.key(100), DIM, 4), metric="l2")
    whole = Index.build(rqjax.Centered(ivf.center, ivf.quantizer), x, metric="l2")
    moved = x - ivf.center
    for y in (queries, queries[:1]):
        scores, ids = ivf.search(y, 20, probes=LISTS)
        expected, rows = whole.search(y, 20)
        np.testing.assert_allclose(scores, expected, atol=2e-3)
        assert rqjax.metrics.recall(ids, rows) > 0.99
        decoded, z = np.asarray(ivf.quantizer.decode(ivf.quantizer.encode(moved))), y - ivf.center
        center = np.asarray(ivf.quantizer.centroids)[np.asarray(ivf.quantizer.encode(moved)[0])]
        left = decoded - center  # distances to centroids are exact, those from there as the codes say
        energies = np.sum(center**2 + 2 * center * left + (moved - center) * left, axis=1)
        product = np.take_along_axis(energies - 2 * z @ decoded.T, np.asarray(ids), axis=1)
        np.testing.assert_allclose(scores, np.sum(z**2, axis=1, keepdims=True) + product, atol=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("residual", some([True, False], [True]))
def test_counted_lists_hold_what_is_best_of_them(residual, monkeypatch):
    """Lists that are longer than what is counted together; rows are chosen by scores that are nearly right."""
    monkeypatch.setattr(probe, "LEAST_ROWS", 16)
    monkeypatch.setattr(probe, "MOST_COUNTED", 16)
    x, queries = vectors(), vectors(40, seed=1)
    ivf = build(rqjax.eden_unbiased(jax.random.key(100), DIM, 4), residual=residual).remove(np.arange(0, 600, 9))
    decoded = np.asarray(ivf.quantizer.decode(ivf.quantizer.encode(x)))
    near = in_lists(ivf, x, queries, 3) & (np.arange(600) % 9 > 0)
    products = np.where(near, queries @ decoded.T, -np.inf)
    scores, ids = ivf.search(queries, 10, probes=3)
    best = np.argsort(-products, axis=1)[:, :10]
    assert rqjax.metrics.recall(ids, best) > 0.995
    np.testing.assert_allclose(scores, np.take_along_axis(products, np.asarray(ids), axis=1), atol=2e-3)


@pytest.mark.parametrize(
    ("name", "metric", "every"),
    some(
        [("eden_unbiased", "l2", 1), ("turboquant_trellis", "ip", 1), ("eden_unbiased", "l2", 4)],
        [("eden_unbiased", "l2", 4)],
    ),
)
def test_lists_read_for_many_queries_together_hold_the_same(name, metric, every, monkeypatch):
    """Long lists in rounds of parts, empty ones, removed and filtered rows, and fewer than are asked for."""
    monkeypatch.setattr(together, "LEAST_ROWS", 16)
    monkeypatch.setattr(together, "MOST_ROWS", 16)
    x, y = vectors(), vectors(90, seed=1)
    x[:200] = x[0] + x[:200] / 9
    ivf = build(rqjax.METHODS[name](jax.random.key(100), DIM, 4), x, metric=metric, store=EXACT)
    ivf = ivf.remove(ivf.search(x[5:6], 60, probes=2)[1][0, 9:])
    assert np.diff(ivf.starts).max() > 2 * 2 * 16
    cases = [
        (10, 6, None, None),
        (1, LISTS, None, None),
        (40, 1, None, None),
        (5, 6, 20, None),
        (9, 6, None, np.arange(600) % 2 > 0),
    ]
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr(together, "LEAST", least)
        jax.clear_caches()
        found.append([ivf.search(y, k, probes=p, rerank=r, where=w) for k, p, r, w in cases[::every]])
    for (scores, ids), (expected, same) in zip(*found, strict=True):
        close = np.isclose(scores, expected, rtol=1e-5, atol=2e-5)
        assert np.mean(close & (np.asarray(ids) == np.asarray(same))) > 0.98  # counted scores miss a few
        for some_ids in (*ids, *same):
            assert len(np.unique(some_ids[some_ids >= 0])) == np.sum(some_ids >= 0)  # none twice where few are there
    jax.clear_caches()


@pytest.mark.full
def test_residuals_have_less_error_than_vectors():
    x, queries = vectors(3000), vectors(100, seed=1)
    code, exact = rqjax.eden_unbiased(jax.random.key(100), DIM, 2), brute_force(x, queries, "ip", 10)[1]
    of = [build(code, x, lists=50, residual=residual) for residual in (True, False)]
    residual, whole = (rqjax.metrics.recall(ivf.search(queries, 10, probes=50)[1], exact) for ivf in of)
    assert residual > whole + 0.05
    shares, lists = 4 * len(x), 4 * (50 * DIM + 51 + 1)
    assert of[0].nbytes - shares == of[1].nbytes == len(x) * (code.bits_per_vector / 8 + 4) + rqjax.nbytes(code) + lists


@pytest.mark.full
def test_selective_filters_search_all_lists(ivf):
    x, queries = vectors(), vectors(5, seed=1)
    few, many = np.arange(0, 600, 40), np.arange(600) % 3 > 0
    assert_same(
        ivf.search(queries, 20, probes=2, where=few),
        expected_of(ivf, x, queries, 20, LISTS, ~(np.arange(600) % 40 > 0)),
    )
    assert_same(ivf.search(queries, 20, probes=2, where=many), expected_of(ivf, x, queries, 20, 2, many))
    traced = jax.jit(lambda ivf, y, where: ivf.search(y, 20, probes=3, where=where))
    assert_same(traced(ivf, queries, many), expected_of(ivf, x, queries, 20, 3, many))
    large = ivf.search(queries, 200, probes=1, where=few)  # more neighbors than a list has
    assert sorted(large[1][0][large[1][0] >= 0].tolist()) == few.tolist()
    nothing = ivf.search(queries, 2, where=[])
    assert np.asarray(nothing[1]).tolist() == [[-1, -1]] * 5


@pytest.mark.full
def test_search_is_a_part_of_a_jitted_function(ivf):
    queries = vectors(6, seed=1)
    expected = ivf.search(queries, 3, probes=4)
    for function in (lambda _, y: ivf.search(y, 3, probes=4), lambda ivf, y: ivf.search(y, 3, probes=4)):
        scores, ids = jax.jit(function)(ivf, queries.reshape(2, 3, DIM))
        np.testing.assert_array_equal(ids.reshape(6, 3), expected[1])
        np.testing.assert_allclose(scores.reshape(6, 3), expected[0], rtol=1e-5)


@pytest.mark.full
def test_vectors_are_added_and_removed(ivf):
    x, queries = vectors(), vectors(5, seed=1)
    without = ivf.remove(np.arange(0, 600, 2))
    assert len(without) == 300
    odd = np.arange(600) % 2 > 0
    assert_same(without.search(queries, 9, probes=4), expected_of(ivf, x, queries, 9, 4, odd))
    again = without.add(x[:600:2], ids=np.arange(0, 600, 2))
    assert len(again.rows.ids) == 600  # free rows are given up
    assert_same(again.search(queries, 9, probes=4), ivf.search(queries, 9, probes=4))
    more = again.add(vectors(1, seed=2))
    assert len(more.rows.ids) == 675
    assert int(more.search(vectors(1, seed=2), 1, probes=1)[1][0, 0]) in (
        600,
        int(brute_force(x, vectors(1, seed=2), "ip", 1)[1][0, 0]),
    )
    assert [len(i) for i in (ivf, without, again, more, more.add(x[:0]))] == [600, 300, 600, 601, 601]
    assert_same(more.remove([600]).search(queries, 9, probes=4), ivf.search(queries, 9, probes=4))


@pytest.mark.full
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_a_compiled_function_adds_to_lists(metric):
    """One of fixed shapes adds what an eager call adds, to a list that becomes the longest, too."""
    x, y = vectors(650), vectors(5, seed=1)
    x[600:] = x[0] + x[600:] / 9
    step = jax.jit(lambda index, x: index.add(x))
    start = build(x=x[:580], metric=metric, room=70)
    grown = step(step(start, x[580:615]), x[615:650])
    eager = start.add(x[580:615]).add(x[615:650])
    assert (len(grown), len(grown.rows.ids)) == (650, 650)
    np.testing.assert_array_equal(grown.rows.ids, eager.rows.ids)
    np.testing.assert_array_equal(grown.starts, eager.starts)
    for probes in (1, 4):
        assert_same(grown.search(y, 60, probes=probes), eager.search(y, 60, probes=probes))
        assert_same(grown.search(y, 60, probes=probes), expected_of(grown, x, y, 60, probes))
    few = grown.remove([3, 4, 5])
    full, same = step(few, x[:35]), few.add(x[:3])  # there is room for three
    assert len(full) == 650
    np.testing.assert_array_equal(full.rows.ids, same.rows.ids)
    assert_same(full.search(y, 9, probes=4), same.search(y, 9, probes=4))
    ids = jnp.array([9000, 7000])
    named = jax.jit(lambda index, x, ids: index.add(x, ids=ids))(start, 2 * x[580:582], ids)
    assert len(named) == 582
    np.testing.assert_allclose(named.reconstruct([9000]), start.add(2 * x[580:581]).reconstruct([580]), rtol=1e-5)


@pytest.mark.parametrize(
    ("metric", "residual"),
    some([("l2", True), ("ip", True), ("cosine", True), ("cosine", False)], [("cosine", True)]),
)
def test_a_function_fits_a_quantizer_to_what_is_encoded(metric, residual, monkeypatch):
    """Some vectors, evenly spaced, less a mean for distances, and less the nearest centroids."""
    monkeypatch.setattr(centers, "LEARNED", 100)
    seen, x = [], vectors().astype(np.float32)
    ivf = build(lambda x: seen.append(x) or EXACT, x, metric=metric, residual=residual)
    x = x[np.linspace(0, 599, 100).astype(int)]
    x = x / np.linalg.norm(x, axis=1, keepdims=True) if metric == "cosine" else x
    x = x - np.asarray(ivf.center) if metric == "l2" else x
    centroids = np.asarray(ivf.quantizer.centroids)
    nearest = ((x[:, None] - centroids) ** 2).sum(2).argmin(axis=1)
    np.testing.assert_allclose(seen[0], x - centroids[nearest] if residual else x, rtol=1e-4, atol=1e-5)
    assert len(seen) == 1
    assert ivf.quantizer.inner is EXACT


@pytest.mark.full
@pytest.mark.parametrize("name", ["pq", "klt_trellis"])
def test_codes_learned_of_residuals_find_more(name):
    """More than codes learned of vectors, which are of another size."""
    x, queries = vectors(3000).astype(np.float32), vectors(100, seed=1)
    exact = brute_force(x, queries, "l2", 10)[1]
    learn = lambda x: rqjax.FITTED[name](jax.random.key(3), x, 2)  # noqa: E731

    def recall(quantizer):
        ivf = build(quantizer, x, lists=50, metric="l2")
        return rqjax.metrics.recall(ivf.search(queries, 10, probes=50)[1], exact)

    assert recall(learn) > recall(learn(x)) + (0.05 if name == "pq" else 0)


@pytest.mark.full
def test_lists_may_be_empty_or_hold_nearly_all():
    x = np.concatenate([np.ones((300, DIM)), vectors(5)]).astype(np.float32)
    ivf = build(x=x, lists=8, metric="l2")
    scores, ids = ivf.search(x[-5:], 305, probes=8)
    expected, _ = brute_force(x, x[-5:], "l2", 305)
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert all(sorted(row) == list(range(305)) for row in ids.tolist())


@pytest.mark.full
def test_a_memory_mapped_file_is_read_a_part_at_a_time(tmp_path):
    np.save(tmp_path / "x.npy", vectors().astype(np.float32))
    mapped = build(x=np.load(tmp_path / "x.npy", mmap_mode="r"), sample=100)
    for one, other in zip(jax.tree.leaves(mapped), jax.tree.leaves(build(x=vectors(), sample=100)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: build(key=None), "expected lists and a key to learn them with, got one without the other"),
        (lambda i: build(lists=None), "expected lists and a key to learn them with, got one without the other"),
        (lambda i: Index.build(EXACT, vectors()).search(vectors(2), 1, probes=2), "expected an index with lists"),
        (lambda i: Index.build(EXACT, vectors(), sample=99), "residual and sample are options of lists"),
        (lambda i: Index.build(EXACT, vectors(), residual=False), "residual and sample are options of lists"),
        (lambda i: build(lists=0), "expected lists to be a whole number from 1 to 600, got 0"),
        (lambda i: build(lists=601), "expected lists to be a whole number from 1 to 600, got 601"),
        (lambda i: build(sample=11), "expected sample to be a whole number from 12 to 600, got 11"),
        (lambda i: build(x=vectors()[:0]), "expected at least 1 vector, got none"),
        (lambda i: build(x=vectors()[:, :3]), "expected vectors \\(n, 16\\), got shape \\(600, 3\\)"),
        (lambda i: build(x=vectors() * np.nan), "expected finite vectors, got 600 with NaN or Inf"),
        (lambda i: build(x=vectors().astype(int)), "expected vectors of a floating-point dtype"),
        (lambda i: build(metric="dot"), "expected metric 'ip', 'l2' or 'cosine', got 'dot'"),
        (lambda i: jax.jit(lambda x: build(x=x).rows)(vectors()), "expected vectors whose numbers are known"),
        (lambda i: i.search(vectors(2), 1, probes=13), "expected probes to be a whole number from 1 to 12, got 13"),
        (lambda i: i.search(vectors(2), 1, probes=0), "expected probes to be a whole number from 1 to 12, got 0"),
        (lambda i: i.search(vectors(2), 601), "expected k to be a whole number from 1 to 600, got 601"),
        (lambda i: i.search(vectors(2) * np.nan, 1), "expected finite queries, got 32 NaN or Inf"),
        (lambda i: i.search(vectors(2), 1, where=[0.5]), "expected where to be booleans, whole numbers or a range"),
        (lambda i: build().search(vectors(2), 1, rerank=2), "pass store= to Index.build"),
        (lambda i: i.add(vectors(2), ids=[5, 2000]), "1 ids are in the index already, the first is 5"),
        (lambda i: i.remove([600]), "1 ids are not in the index, the first is 600"),
        (lambda i: i.shard(jax.sharding.Mesh(jax.devices()[:1], "x"), "y"), "expected an axis of the mesh \\(x\\)"),
    ],
)
def test_bad_input_is_one_error(ivf, change, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        change(ivf)
    assert "\n" not in str(error.value)


def test_save_and_load_and_torn_files(ivf, tmp_path):
    path, queries = tmp_path / "a.safetensors", vectors(5, seed=1)
    ivf.save(path)
    again = Index.load(path)
    assert jax.tree.structure(again) == jax.tree.structure(ivf)
    for one, other in zip(again.search(queries, 5), ivf.search(queries, 5), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(again.add(vectors(3))) == 603
    with pytest.raises(ValueError, match="expected an index without lists to leave in a file, found 12 in"):
        Index.load(path, mapped=True)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        Index.load(path)


@pytest.mark.full
def test_a_damaged_file_is_refused(tmp_path):
    """10,000 files cut or with one bit flipped anywhere."""
    path, random = tmp_path / "a.safetensors", np.random.default_rng(0)
    build(x=vectors(40), lists=3).save(path)
    content = path.read_bytes()
    for i in range(10_000):
        place = int(random.integers(len(content)))
        flipped = content[:place] + bytes([content[place] ^ 1 << int(random.integers(8))]) + content[place + 1 :]
        path.write_bytes(content[:place] if i % 4 == 0 else flipped)
        with pytest.raises(ValueError, match=r"safetensors|damaged|was not saved by this version"):
            Index.load(path)


@pytest.mark.full
def test_memory_does_not_grow_with_the_index(ivf):
    """A compiled search of 1000 queries allocates less than 64 MiB, whatever the number of vectors."""

    def temporaries(count):
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), ivf.rows)
        queries = jax.ShapeDtypeStruct((1000, DIM), jnp.float32)

        def search(rows, y):
            return dataclasses.replace(ivf, rows=rows, store=None).search(y, 10, probes=4)

        return jax.jit(search).lower(rows, queries).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(10_000), temporaries(1_000_000)
    assert many < 2**26
    assert many - few < 2**20
