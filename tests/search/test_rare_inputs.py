"""Numbers of NumPy as arguments, indexes that begin with one vector, and wide ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax

KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((1000, 64)).astype(np.float32)


def test_counts_may_be_numbers_of_numpy():
    index = rqjax.Index.build(rqjax.eden(KEY, 64, 2), X[:100], store=rqjax.Exact(64))
    for options in ({"rerank": 20}, {"where": [1, 2]}):
        wanted = index.search(X[:2], 5, **options)[1]
        found = index.search(X[:2], np.int64(5), **jax.tree.map(np.int64, options))[1]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_an_index_that_began_with_one_vector(metric):
    x, y = X.copy(), X[900:] + 0.1
    x[0] *= 100
    q = rqjax.eden(KEY, 64, 4)
    one, none = (rqjax.Index.build(q, x[:n], metric=metric).add(x[n:]) for n in (1, 0))
    np.testing.assert_array_equal(one.search(y, 10)[1], none.search(y, 10)[1])


@pytest.mark.full
def test_many_queries_of_many_neighbors():
    """A part of the groups of a large scan holds as many as are wanted."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32_500, 4)).astype(np.float32), rng.standard_normal((1100, 4)).astype(np.float32)
    scores, ids = rqjax.Index.build(rqjax.Exact(4, "float32"), x).search(y, 1000)
    wanted = np.sort(y[-3:] @ x.T, axis=1)[:, :-1001:-1]
    np.testing.assert_allclose(scores[-3:], wanted, rtol=1e-5)
    assert len(np.unique(ids[-1])) == 1000


class Growing:
    """An array that takes growing places alone, as a dataset of h5py."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.ndim = x, x.shape, x.dtype, x.ndim

    def __len__(self):
        return len(self.x)

    def __getitem__(self, places):
        assert not isinstance(places, np.ndarray) or (np.diff(places) > 0).all()
        return self.x[places]


@pytest.mark.full
def test_lists_of_a_file_that_takes_growing_places_alone():
    options = {"lists": 10, "key": KEY}
    found, wanted = (rqjax.Index.build(rqjax.Exact(64), x, **options) for x in (Growing(X), X))
    np.testing.assert_array_equal(found.search(X[:5], 3, probes=10)[1], wanted.search(X[:5], 3, probes=10)[1])


def test_vectors_of_wide_ids():
    ids = np.array([2**60, 2**60 + 1], np.uint64)
    index = rqjax.Index.build(rqjax.Exact(4, "float32"), np.eye(4, dtype=np.float32)[:2], ids=ids)
    np.testing.assert_array_equal(index.reconstruct(ids[::-1]), np.eye(4)[[1, 0]])


def test_metrics_of_half_precision():
    x = jnp.full((4, 1024), 10, jnp.float16)
    assert rqjax.metrics.relative_mse(x, jnp.zeros((4, 1024))) == 1
    assert rqjax.metrics.cosine(x, x) == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="expected ids of as many queries, got 2 and 1"):
        rqjax.metrics.recall(np.zeros((2, 3), int), np.zeros((1, 3), int))


def test_recall_is_of_neighbors_that_are_there():
    """Queries have numbers of neighbors and of results of their own; large ids of any kind are compared exactly."""
    rng = np.random.default_rng(0)
    found, true = (np.stack([rng.permutation(30)[:count] for _ in range(20)]) for count in (9, 5))
    hits = sum(len({*own} & {*near}) for own, near in zip(found.tolist(), true.tolist(), strict=True))
    assert rqjax.metrics.recall(found, true) == hits / 100
    assert rqjax.metrics.recall(found[:, :1].astype(np.uint64), true) <= hits / 100
    assert rqjax.metrics.recall(jnp.asarray([[1, 2, -1], [4, 5, 6]]), np.array([[2, 9, -1], [6, 4, 5]])) == 4 / 5
    assert rqjax.metrics.recall(np.array([[2**53]]), np.array([[2**53 + 1]], np.uint64)) == 0
    assert rqjax.metrics.recall(np.array([[2**62 + 1]]), np.array([[2**62 + 1]], np.uint64)) == 1


def test_bits_of_numpy_are_saved_as_numbers(tmp_path):
    q = rqjax.rtn(KEY, 32, 4)
    object.__setattr__(q, "bits", np.int64(4))
    rqjax.save(q, tmp_path / "q.safetensors")
    loaded = rqjax.load(tmp_path / "q.safetensors")
    assert type(loaded.bits) is int
    assert rqjax.encode(loaded, jnp.ones((2, 32))) is not None


@pytest.mark.full
def test_the_most_bits_of_learned_codes():
    x = jax.random.normal(KEY, (300, 8))
    assert rqjax.rotorquant_allocated(jax.random.key(1), x, 8).decode is not None


def test_a_dimension_that_exchange_does_not_divide():
    with pytest.raises(ValueError, match=r"a dimension that 2\^2 = 4 divides for 2 levels of exchange, got 6"):
        rqjax.qet(KEY, jax.random.normal(KEY, (300, 6)), 2)
