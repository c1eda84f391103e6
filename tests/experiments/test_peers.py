"""Experiments against peers and baselines: what they compare is what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from experiments.caches import kv_throughput
from experiments.codes import train_rotor
from experiments.harness import published
from experiments.search import recall, search
from tests.tools.suites import some

pytestmark = pytest.mark.full


def test_published_figures():
    """RotorQuant's Table 5; QET's section 4.2, whose multiples of RTN are of the matrices that its figures are of."""
    assert {(bits, values[0]) for bits, values in published.INNER_PRODUCT["turboquant_prod"].items()} == {
        (3, 0.0),
        (4, 0.001),
    }
    assert set(published.QET_RTN) == set(published.QET_VS_PQ)


def test_plain_caches_hold_the_tokens_and_no_more(monkeypatch):
    """All of a plain cache is looked at, each cache holds the same tokens, and all outputs are the same attention."""
    seen, real = [], kv_throughput.plain_attend

    def turns(functions, rounds, calls):
        outputs = {name: np.asarray(function()) for name, function in functions.items() if name != "append"}
        expected = outputs["float32 bhtd"]
        for name, out in outputs.items():
            np.testing.assert_allclose(out, expected, atol={"f": 1e-6, "b": 0.01}.get(name[0], 0.1), err_msg=name)
        return {name: np.ones((rounds, calls)) for name in functions}

    def plain_attend(cache, q, layout):
        seen.append((cache[0].dtype.name, layout, cache[0].size, cache[1].size, cache[2]))
        return real(cache, q, layout)

    monkeypatch.setattr(kv_throughput, "turns", turns)
    monkeypatch.setattr(kv_throughput, "plain_attend", plain_attend)
    row = kv_throughput.run({"shape": "1x200", "kv_heads": 2, "dim": 16, "rounds": 16, "strategy": "v3_4"})
    assert row["vs_float32"] == row["vs_bfloat16"] == 1
    size = 2 * 200 * 16
    expected = [(d, layout, size, size, None) for d in ("bfloat16", "float32") for layout in ("bhdt", "bhtd")]
    assert sorted(seen, key=str) == sorted(expected * kv_throughput.PLACES, key=str)


@pytest.mark.parametrize("codec", some(["turboquant", "faiss_tqmse"], ["turboquant"]))
def test_each_seed_of_recall_draws_vectors_and_rotation(codec, monkeypatch):
    """Neither alone would make a deviation that says how far another draw is."""
    point = {"vectors": "sphere, d = 16", "n": 400, "queries": 50, "seeds": 2, "bits": 2}
    (same, other) = search.sets("sphere", 2, 400, 50, 16)
    assert not np.array_equal(same[0], other[0])
    assert not np.array_equal(same[1], other[1])
    monkeypatch.setattr(search, "sets", lambda *_: [same, same])
    assert recall.run({**point, "codec": codec})["10@10_sd"] > 0


def test_nothing_is_learned_about_vectors_held_out():
    """Isotropic vectors have nothing to learn from. A fit to 48 of them errs on others as a random rotation does
    (1.01), and on the 48 two thirds as much or less."""
    point = {"dim": 16, "bits": 2, "data": "gaussian", "n": 64, "seeds": 8, "parametrisation": "procrustes"}
    assert train_rotor.run(point)["vs_haar"] > 0.85


def test_fit_does_not_train_on_what_it_holds_out():
    """Gradients come from marked vectors only, and only the last eighth is marked."""
    x = jnp.zeros((64, 4)).at[56:, 0].set(1)
    start = rqjax.Centered(jnp.zeros(4), rqjax.lloyd_max(4, 2))
    loss = lambda q, batch, progress: jnp.mean(batch[:, 0]) * (jnp.sum(q.mean) - 1) ** 2  # noqa: E731
    trained, history = rqjax.fit(start, x, jax.random.key(0), where=lambda q: q.mean, loss=loss, steps=8, evaluations=2)
    assert history["validation"].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(trained.mean, start.mean)
