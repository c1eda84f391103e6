"""Vectors to quantize: isotropic, structured, words of Python's own library, and the user's files."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data import passages as sentences, vector_files, words as english
from rqjax.core import Registry, extras
from rqjax.rotations import Dense

Sampler = Callable[[jax.Array, int, int], jax.Array]
HELD_OUT = 4
"""Rows of which one is held out from fitting."""


def gaussian(key, n, dim):
    """Independent standard normal coordinates."""
    return jax.random.normal(key, (n, dim))


def sphere(key, n, dim):
    """Uniform unit vectors."""
    x = gaussian(key, n, dim)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def outlier_channels(key, n, dim):
    """Gaussian, four random channels times ten."""
    channels_key, key = jax.random.split(key)
    channels = jax.random.choice(channels_key, dim, (4,), replace=False)
    return gaussian(key, n, dim) * jnp.ones(dim).at[channels].set(10)


def lognormal_channels(key, n, dim):
    """Gaussian, each channel times exp(N(0, 1))."""
    scales_key, key = jax.random.split(key)
    return gaussian(key, n, dim) * jnp.exp(jax.random.normal(scales_key, (dim,)))


def one_hot(key, n, dim):
    """Unit vectors along random axes."""
    return jax.nn.one_hot(jax.random.randint(key, (n,), 0, dim), dim)


def decaying_spectrum(key, n, dim):
    """Gaussian, channel i with variance 1 / i."""
    return gaussian(key, n, dim) / jnp.sqrt(jnp.arange(1, dim + 1))


def decaying_spectrum_rotated(key, n, dim):
    """`decaying_spectrum` under a random rotation that is the same for every seed."""
    return Dense.haar(jax.random.key(0), dim)(decaying_spectrum(key, n, dim))


def clustered(key, n, dim):
    """Unit vectors in 500 clusters about a mean, `decaying_spectrum_rotated` between and within: like embeddings."""
    centers_key, key, labels_key = jax.random.split(key, 3)
    mean = sphere(jax.random.key(1), 1, dim)
    centers = decaying_spectrum_rotated(centers_key, 500, dim)[jax.random.randint(labels_key, (n,), 0, 500)]
    x = 1.5 * mean + centers + 0.7 * decaying_spectrum_rotated(key, n, dim)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def words(key, n, dim):
    """Vectors of words: up to 300 dimensions, at least 10,000 words, no download."""
    return _rows(english.vectors(), key, n, dim, "words")


def wordllama(key, n, dim):
    """Embeddings of 32,000 tokens in 256 dimensions, of the package `wordllama` (Miller, 2024; MIT)."""
    return _rows(vector_files.read(str(_wordllama())), key, n, dim, "wordllama")


def _wordllama() -> Path:
    """Finds the file in the package, whose code is not imported."""
    with extras.explained():
        spec = find_spec("wordllama")
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(name="wordllama")
    return Path(spec.origin).parent / "weights" / "l2_supercat_256.safetensors"


def passages(key, n, dim):
    """Sentence embeddings of 10,510 passages of Python's own library in 384 dimensions, with the mean that they have in
    common, no download."""
    return _rows(sentences.vectors(), key, n, dim, "passages")


def kv(key, n, dim):
    """Keys and values of all layers and heads of the model in `results/models` whose head dimension is `dim`.

    The rows that `split` holds out come from windows of text of their own: the seed chooses two of eight.
    """
    order_key, train_key, test_key = jax.random.split(key, 3)
    windows = _kv_windows(dim)
    order = np.asarray(jax.random.permutation(order_key, len(windows)))
    held = len(windows) // HELD_OUT
    train = _rows(windows[order[held:]].reshape(-1, dim), train_key, n - n // HELD_OUT, dim, "kv")
    test = _rows(windows[order[:held]].reshape(-1, dim), test_key, n // HELD_OUT, dim, "kv")
    return jnp.concatenate([train, test])


@functools.lru_cache(maxsize=1)
def _kv_windows(dim: int) -> np.ndarray:
    """Keys and values (windows, vectors, dim) of eight windows of 512 tokens of held-out text."""
    with extras.explained():
        from experiments.data import text
        from experiments.models.models import BY_DIM, calibration

    if dim not in BY_DIM:
        raise ValueError(f"kv has vectors of {', '.join(map(str, BY_DIM))} dimensions, got dim = {dim}")
    arrays = calibration(BY_DIM[dim], "", 512, 8, text.held_out)
    return np.concatenate([np.asarray(x).reshape(8, -1, dim) for name, x in arrays.items() if name[-1] != "q"], axis=1)


DATA: Registry = Registry(
    "data set",
    {
        sample.__name__: sample
        for sample in (
            gaussian,
            sphere,
            outlier_channels,
            lognormal_channels,
            one_hot,
            decaying_spectrum,
            decaying_spectrum_rotated,
            clustered,
            words,
            wordllama,
            passages,
            kv,
        )
    },
)


def check(name: str) -> None:
    """Raises for a data set that does not exist, or that needs a missing package."""
    sampler = None if name.startswith("file:") else DATA[name]
    if sampler is wordllama:
        _wordllama()
    if sampler is kv:
        with extras.explained():
            from experiments.models import models as models


def dimension(point: dict[str, Any]) -> int:
    """Returns the dimension of the vectors of a point: its `dim`, or if that is 0 all that its `data` have."""
    return point["dim"] or {"words": english.WORD_DIMS, "wordllama": 256, "passages": 384}[point["data"]]


@functools.lru_cache(maxsize=2)
def sample(name: str, seeds: int, n: int, dim: int) -> jax.Array:
    """(seeds, n, dim) vectors of a data set, or of `file:PATH[#ARRAY]`; the seeds are 0, 1, ..., seeds - 1."""
    if name.startswith("file:"):
        path, _, array = name.removeprefix("file:").partition("#")
        vectors = vector_files.read(path, array)
        sampler: Sampler = lambda key, n, dim: _rows(vectors, key, n, dim, name)  # noqa: E731
    else:
        sampler = DATA[name]
    return jnp.stack([sampler(jax.random.key(1000 + seed), n, dim) for seed in range(seeds)])


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows (seeds, n, dim) of `sample` to fit on, and those held out."""
    held = x.shape[1] // HELD_OUT
    return x[:, :-held], x[:, -held:]


def _rows(vectors: np.ndarray, key: jax.Array, n: int, dim: int, name: str) -> jax.Array:
    """`n` random rows (all, if there are fewer), first `dim` columns."""
    if vectors.shape[1] < dim:
        raise ValueError(f"{name} has {vectors.shape[1]} dimensions, expected at least {dim}")
    chosen = jax.random.permutation(key, len(vectors))[:n]
    return jnp.asarray(vectors[np.asarray(chosen), :dim])
