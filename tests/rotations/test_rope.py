"""Rotary positions: how vectors turn, and products with one that turns."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.suites import some

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
ROPES = {
    "default": rqjax.Rope(1e4),
    "linear": rqjax.Rope.parse(1e4, {"type": "linear", "factor": 4.0}),
    "llama3": rqjax.Rope.parse(5e5, {"rope_type": "llama3", **LLAMA3}),
    "yarn": rqjax.Rope.parse(1e6, YARN),
    "half of the coordinates": rqjax.Rope(1e4, share=0.5),
    "longrope": rqjax.Rope(1e4, "longrope", (*np.linspace(1, 9, 32).tolist(), 1.2)),
}


def complex_turned(rope, x, positions):
    """Turns by complex numbers in float64, plane by plane."""
    x, frequencies = np.asarray(x, np.float64), rope.frequencies(x.shape[-1]).astype(np.float64)
    half = len(frequencies)
    z = x[..., :half] + 1j * x[..., half : 2 * half]
    z = rope.length * z * np.exp(1j * np.asarray(positions)[..., None] * frequencies)
    return np.concatenate([z.real, z.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("name", ROPES)
def test_turns_planes_and_back(name):
    rope, x = ROPES[name], jax.random.normal(jax.random.key(0), (3, 5, 64))
    positions = jnp.array([0, 1, 7, 100, 3000])
    turned = rope(x, positions)
    np.testing.assert_allclose(turned, complex_turned(rope, x, positions), atol=2e-3)  # angles are float32
    np.testing.assert_allclose(turned[:, :3], complex_turned(rope, x, positions)[:, :3], atol=1e-5)
    np.testing.assert_allclose(rope.inverse(turned, positions), x, atol=1e-5)


@pytest.mark.parametrize("first", some([0, 4, 1000], [1000]))
@pytest.mark.parametrize("name", ROPES)
def test_products_with_what_turns(name, first):
    """Products by tables equal those token by token."""
    rope, (y, x) = ROPES[name], jax.random.normal(jax.random.key(0), (2, 2, 3, 64))
    turned = rope(jnp.broadcast_to(x[:, :1], (2, 256, 64)), first + jnp.arange(256))
    np.testing.assert_allclose(rope.inner(y, x[:, 0], first, 256), jnp.einsum("nrd,ntd->nrt", y, turned), atol=2e-3)
    rows = jax.random.normal(jax.random.key(1), (2, 64, 256))
    expected = jnp.swapaxes(rope(jnp.swapaxes(rows, 1, 2), first + jnp.arange(256)), 1, 2)
    np.testing.assert_allclose(rope.turned_rows(rows, first), expected, atol=1e-3)


def test_yarn_slows_long_waves_only():
    """Planes of more than 32 turns in the original length keep their frequency; those of less than one turn have a
    fourth of it. Queries and keys are both 0.1 ln 4 + 1 times as long. Source: Peng et al. (2023)."""
    plain, yarn = rqjax.Rope(1e6).frequencies(128), ROPES["yarn"].frequencies(128)
    turns, ratio = 4096 * plain / (2 * math.pi), yarn / plain
    np.testing.assert_allclose(ratio[turns > 35], 1)
    np.testing.assert_allclose(ratio[turns < 0.9], 0.25)
    assert (np.diff(ratio) <= 0).all()
    assert ROPES["yarn"].length == pytest.approx(0.1 * math.log(4) + 1)
    assert rqjax.Rope.parse(1e6, {**YARN, "attention_factor": 1.5}).length == 1.5


def test_a_rope_that_does_not_fit():
    with pytest.raises(ValueError, match="expected a rope that turns an even number of 64 coordinates, got 5"):
        rqjax.Rope(1e4, share=0.08).frequencies(64)
    with pytest.raises(ValueError, match=r"unsupported rope_type 'dynamic' in config\.json"):
        rqjax.Rope.parse(1e4, {"rope_type": "dynamic"})
    with pytest.raises(ValueError, match=r"config\.json has no 'short_factor' for its rope_type 'longrope'"):
        rqjax.Rope.parse(1e4, {"rope_type": "longrope"})
    with pytest.raises(ValueError, match="expected 32 factors of a longrope, got 2"):
        rqjax.Rope(1e4, "longrope", (1.0, 2.0, 1.0)).frequencies(64)
    with pytest.raises(ValueError, match=r"config\.json has no 'factor' for its rope_type 'yarn'"):
        rqjax.Rope.parse(1e4, {"rope_type": "yarn"})
    with pytest.raises(ValueError, match="expected theta to be positive, got 0"):
        rqjax.Rope(0)
    with pytest.raises(rqjax.UnknownName, match="did you mean 'llama3'"):
        rqjax.Rope(1e4, "llama")
    with pytest.raises(ValueError, match=r"expected factors .*'factor',.* of a rope of kind 'linear'"):
        rqjax.Rope(1e4, "linear")


def by_definition(kind, theta, dim, fields):
    """Frequencies in float64, plane by plane."""
    out = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        turns = fields.get("original_max_position_embeddings", 1) * frequency / (2 * math.pi)
        if kind == "linear":
            frequency /= fields["factor"]
        if kind == "longrope":
            frequency /= fields["long_factor"][i]
        if kind == "llama3":
            low, high = fields["low_freq_factor"], fields["high_freq_factor"]
            slow = frequency / fields["factor"]
            share = 0 if turns < low else 1 if turns > high else (turns - low) / (high - low)
            frequency = share * frequency + (1 - share) * slow
        if kind == "yarn":  # where a plane of so many turns would lie; between the two the share of the slow one grows
            length, log = fields["original_max_position_embeddings"], math.log(theta)
            first, last = (
                dim * math.log(length / (2 * math.pi * fields.get(name, usual))) / (2 * log)
                for name, usual in (("beta_fast", 32), ("beta_slow", 1))
            )
            if fields.get("truncate", True):
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, dim - 1)
            share = min(max((i - first) / (last - first), 0), 1)
            frequency *= 1 - share + share / fields["factor"]
        out.append(frequency)
    return out


@pytest.mark.parametrize(
    ("theta", "fields"),
    [
        (1e4, {"rope_type": "default"}),
        (1e6, {"rope_type": "linear", "factor": 8.0}),
        (5e5, {"rope_type": "llama3", **LLAMA3}),
        (1e4, {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}),
        (1e6, YARN),
        (150_000, {**YARN, "factor": 32.0, "truncate": False, "beta_fast": 16, "beta_slow": 2}),
        (1e4, {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64, "short_factor": []}),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_frequencies_are_those_of_the_papers(theta, fields, share):
    dim = int(64 * share)
    if fields["rope_type"] == "longrope":
        fields = {**fields, "long_factor": np.linspace(1, 9, dim // 2).tolist()}
    found = rqjax.Rope.parse(theta, fields, share).frequencies(64)
    np.testing.assert_allclose(found, by_definition(fields["rope_type"], theta, dim, fields), rtol=1e-6)
