"""OSCAR equals its published formulas in NumPy, and its rotation helps where it should."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.nn import exact_attention, load_decoder
from tests.tools.suites import some

pytestmark = pytest.mark.full

KEY = jax.random.key(0)
LLAMA = Path(__file__).parents[1] / "checkpoints" / "llama"
FIT = jax.jit(rqjax.oscar, static_argnums=2)


def samples(seed, n, dim):
    """Queries, keys and values of two heads, loud along directions of their own."""
    rng = np.random.default_rng(seed)
    spectrum = np.exp(-2 * np.arange(dim) / dim)
    turns = [np.linalg.qr(rng.normal(size=(2, dim, dim)))[0] for _ in range(3)]
    return [np.asarray((rng.normal(size=(2, n, dim)) * spectrum) @ turn, np.float32) for turn in turns]


def hadamard(dim):
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(dim)


def reversed_bits(values):
    """The permutation matrix P: what is sorted by falling eigenvalue goes to places in the order of reversed bits."""
    dim, places = len(values), np.zeros(len(values), int)
    for rank, column in enumerate(np.argsort(-values)):
        places[int(format(rank, f"0{dim.bit_length() - 1}b")[::-1], 2)] = column
    return np.eye(dim)[:, places]


def clipped(x, bits, share, group=128):
    """Rows cut at the magnitude of rank share d, then rounded to nearest in groups: scale and least number float16."""
    dim = x.shape[1]
    limit = np.sort(np.abs(x), axis=1)[:, int(share * dim), None]
    groups = np.clip(x, -limit, limit).reshape(len(x), -1, min(group, dim))
    low = groups.min(-1, keepdims=True)
    scale = (groups.max(-1, keepdims=True) - low) / (2**bits - 1)
    return (np.round((groups - low) / scale) * np.float16(scale) + np.float16(low)).reshape(x.shape)


def second_moments(queries):
    return np.array([q.T @ q / len(q) for q in queries.astype(np.float64)], np.float32)


def covariance(moments, keys=(), values=()):
    """Mean over heads: that of queries, or of values weighted by the scores of their keys."""
    found = [moment.astype(np.float64) for moment in moments]
    for head, (k, v) in enumerate(zip(keys, values, strict=True)):
        weights = np.einsum("nd,de,ne->n", k, found[head], k)
        found[head] = v.T.astype(np.float64) @ np.diag(weights / weights.sum()) @ v
    return np.mean(found, axis=0)


def axes_of(quantizer):
    """Returns U of the rotation U H P; all heads share it."""
    matrices = np.asarray(quantizer.inner.rotation.matrix, np.float64)
    assert (matrices == matrices[0]).all()
    return matrices[0].T @ reversed_bits(np.arange(matrices.shape[1])).T @ hadamard(matrices.shape[1])


@pytest.mark.parametrize("dim", some([64, 256], [64]))
@pytest.mark.parametrize("side", ["keys", "values"])
def test_oscar_is_its_formula(side, dim):
    queries, keys, values = samples(0, 600, dim)
    moments = second_moments(queries)
    if side == "keys":
        x, share, others, quantizer = keys, 0.96, (), FIT(KEY, keys, 2, queries=moments)
    else:
        x, share, others, quantizer = values, 0.92, (keys, values), FIT(KEY, values, 2, queries=moments, keys=keys)
    eigenvalues, axes = np.linalg.eigh(covariance(moments, *others))
    axes *= np.sign(np.sum(axes_of(quantizer) * axes, axis=0))  # signs are free
    rotation = axes @ hadamard(dim) @ reversed_bits(eigenvalues)
    np.testing.assert_allclose(quantizer.inner.rotation.matrix[0].T, rotation, atol=2e-3)
    decoded = np.asarray(quantizer.decode(quantizer.encode(x)))
    for head in range(2):
        expected = clipped(x[head] @ rotation, 2, share) @ rotation.T
        assert np.linalg.norm(decoded[head] - expected) < 0.02 * np.linalg.norm(expected)


def score_errors(keys, queries):
    """Relative squared errors of scores with OSCAR and with a Hadamard rotation before the same grid."""
    keys, moment = jnp.asarray(keys, jnp.float32), second_moments(queries[None])[0]
    oscar = FIT(KEY, keys, 2, queries=moment)
    plain = rqjax.Rotated(rqjax.rotations.Hadamard(jnp.ones(keys.shape[1], jnp.int8)), oscar.inner)
    loss = rqjax.losses.ScoreError(jnp.asarray(moment))
    return [float(loss.error(keys, q.decode(q.encode(keys)))) for q in (oscar, plain)]


def test_the_rotation_follows_the_queries():
    """Keys are loud along four Walsh functions, which a Hadamard matrix turns into one coordinate each, and queries
    look there: OSCAR spreads them.

    Along any four directions a Hadamard matrix serves as well. If keys are the same in all directions, it does not
    matter which of them queries see.
    """
    dim, rng = 128, np.random.default_rng(0)
    loud = np.where(np.arange(dim) < 4, 10, 1)
    few = np.where(np.arange(dim) < 4, 1, 0.01)
    normal = rng.normal(size=(2, 1500, dim))
    walsh = hadamard(dim)[rng.permutation(dim)]
    oscar, plain = score_errors(normal[0] * loud @ walsh, normal[1] * few @ walsh)
    assert oscar < 0.02 < 0.5 < plain
    for spectrum in (loud, np.ones(dim)):
        turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
        oscar, plain = score_errors(normal[0] * spectrum @ turn, normal[1] * few @ turn)
        assert 0.8 < oscar / plain < 1.3


def test_a_decoder_gives_it_its_queries():
    """A decoder passes on second moments of a layer's queries after rotary positions, and its keys to the values."""
    model, tokens = load_decoder(LLAMA), np.load(LLAMA / "logits.npz")["tokens"]
    seen = []

    def attend(layer, q, k, v):
        q, k = model.turned(layer, jnp.arange(q.shape[1])[None], q, k)
        seen.append((q, k, v))
        return exact_attention(q, k, v, **model.attention_options(layer))

    model.hidden(tokens, attend)
    for strategy, parts in zip(model.calibrate(tokens, "oscar_2", KEY), seen, strict=True):
        q, k, v = (np.moveaxis(np.asarray(part), 2, 0) for part in parts)  # (heads, batch, time, d)
        q, k, v = (part.reshape(2, -1, part.shape[-1]) for part in (q, k, v))  # two heads of queries share one of keys
        assert strategy.keys.inner.inner.share > strategy.values.inner.inner.share
        for quantizer, others in ((strategy.keys, ()), (strategy.values, (k, v))):
            axes = axes_of(quantizer)
            turned = axes.T @ covariance(second_moments(q), *others) @ axes
            spectrum = np.diag(turned)
            assert np.all(np.diff(spectrum) > -1e-5 * spectrum[-1])
            assert np.abs(turned - np.diag(spectrum)).max() < 1e-5 * spectrum[-1]


def test_shares():
    with pytest.raises(ValueError, match="expected a share from 0 to 1"):
        rqjax.Clipped(rqjax.MinMax(32, 2, group_size=32), share=1.5)
    assert FIT(KEY, samples(0, 300, 96)[1], 2).bits_per_vector == 96 * 2 + 32
