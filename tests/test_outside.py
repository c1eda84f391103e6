"""Vectors unlike those that a code was fitted to: dead channels, new directions and sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.arrays import norms
from rqjax.quantizers import gain
from rqjax.recipes import learned
from rqjax.recipes.allocation import allocate
from tests.tools.suites import some

DIM, ALIVE, KEY = 64, 16, jax.random.key(0)
round_trip = jax.jit(lambda q, x: q.decode(q.encode(x)))


def padded(n):
    """Vectors of several sizes with the last three quarters of the channels constant: heads padded with zeros."""
    first, second = jax.random.split(KEY)
    x = jax.random.normal(first, (n, ALIVE)) * jnp.exp2(jax.random.normal(second, (n, 1)))
    return jnp.pad(x, [(0, 0), (0, DIM - ALIVE)])


@pytest.fixture
def untrained(monkeypatch):
    """Disables training: recipes return what they begin with."""
    monkeypatch.setattr(learned, "fit", lambda quantizer, *_, **__: (quantizer, {}))


@pytest.mark.full
def test_bits_of_constant_channels():
    """Budgets of 3 bits a channel exceed the bits that 16 channels can take."""
    x = norms.direction(padded(300))
    x = x[:, np.argsort(-x.var(axis=0))]
    bits = allocate(np.asarray(x.var(axis=0)) + 1e-30, 3 * DIM + 16)
    assert min(bits) > 0

    @jax.jit
    def errors(x):
        codes = [
            kind.gaussian(x.mean(axis=0), x.std(axis=0), bits)
            for kind in (rqjax.PerCoordinate, rqjax.TrellisPerCoordinate)
        ]
        return [rqjax.metrics.relative_mse(x, code.decode(code.encode(x))) for code in codes]

    levels, trellis = errors(x)
    assert levels < 1e-3
    assert trellis < levels


@pytest.mark.parametrize(
    ("name", "sizes"),
    some(
        [
            ("rotorquant_allocated", "many"),
            ("rotorquant_allocated", "one"),
            ("rotorquant_allocated_trellis", "many"),
            ("rotorquant_learned", "many"),
            ("klt_trellis", "many"),
            ("pq", "many"),
        ],
        [],
    ),
)
def test_no_vector_decodes_to_one_far_away(untrained, name, sizes):
    """Squared errors are at most 4 times the vector's own square. Codes without a norm or gain may have 4 times the
    mean square of the vectors that they were learned from, if that is more."""
    train = padded(300) if sizes == "many" else norms.direction(padded(300))
    quantizer = rqjax.FITTED[name](KEY, train, 3)
    relative = isinstance(quantizer, rqjax.Scaled) or isinstance(getattr(quantizer, "inner", None), rqjax.Gain)
    assert relative == (name != "pq" and (sizes == "many" or "allocated" not in name))
    outside = jax.random.normal(KEY, (20, DIM)) * (jnp.arange(DIM) >= ALIVE)
    x = jnp.concatenate([train[:20], jnp.eye(DIM), outside, train[:20] + outside, jnp.zeros((1, DIM))])
    x = jnp.concatenate([scale * x for scale in (1e-30, 1e-6, 1e-3, 1, 1e3, 1e6, 1e30)])
    decoded, x = np.asarray(round_trip(quantizer, x), np.float64), np.asarray(x, np.float64)
    least = 0 if relative else np.mean(np.sum(np.asarray(train) ** 2, axis=1))
    assert (np.sum((decoded - x) ** 2, axis=1) <= 4 * np.maximum(np.sum(x**2, axis=1), least)).all()


@pytest.mark.full
def test_gains_of_usual_vectors_stay(untrained):
    """Only vectors that would otherwise be decoded farther away than 0 get another gain."""
    x = padded(300)
    quantizer = rqjax.rotorquant_allocated(KEY, x, 3)
    gains = jax.jit(lambda q, x: (q.encode(x)[0], gain.nearest_gains(q.rotation(x), q.inner.weights)))
    np.testing.assert_array_equal(*gains(quantizer, x))
