"""Vectors to quantize: isotropic, structured, words of Python's own library, and the user's files."""

import functools
import hashlib
import lzma
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from experiments.cache import cached
from rqjax.core import Registry, extras, unknown_name
from rqjax.rotations import Dense

Sampler = Callable[[jax.Array, int, int], jax.Array]
HELD_OUT = 4
"""One row in so many is held out from what is fitted."""


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
    return _rows(_words(), key, n, dim, "words")


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
        from experiments import text
        from experiments.models import BY_DIM, calibration

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
            kv,
        )
    },
)


def check(name: str) -> None:
    """Raises for a data set that there is not, or for which a package is missing."""
    if not name.startswith("file:") and DATA[name] is kv:
        with extras.explained():
            from experiments import models as models


@functools.lru_cache(maxsize=2)
def sample(name: str, seeds: int, n: int, dim: int) -> jax.Array:
    """(seeds, n, dim) vectors of a data set, or of `file:PATH[#ARRAY]`; the seeds are 0, 1, ..., seeds - 1."""
    if name.startswith("file:"):
        path, _, array = name.removeprefix("file:").partition("#")
        vectors = read(path, array)
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


def read(name: str, array: str = "") -> np.ndarray:
    """The vectors that `mapped` finds, in float32 and finite."""
    vectors = np.array(mapped(name, array), np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError(f"expected finite vectors in {name}, got NaN or Inf in {(~np.isfinite(vectors)).sum()} places")
    return vectors


def mapped(name: str, array: str = "") -> np.ndarray:
    """The vectors (n, d) of a .npy, .npz, .safetensors, .fvecs or .hdf5 file; of several arrays the first ("train" of a
    .hdf5 file) or the one of that name. Files .npy and .fvecs are mapped into memory: what is used is read."""
    vectors = _array(name, array)
    if vectors.ndim < 2 or vectors.size == 0 or vectors.dtype.kind != "f":
        raise ValueError(f"expected floating-point vectors (n, d) in {name}, got {vectors.dtype} {vectors.shape}")
    native = vectors.dtype.newbyteorder("=")  # jax has no other
    return vectors.reshape(-1, vectors.shape[-1]).astype(native, copy=False)


def read_ids(name: str, array: str = "") -> np.ndarray:
    """The whole numbers (n, k) of a .ivecs file, or of an array as `mapped` chooses it."""
    ids = _array(name, array)
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"expected whole numbers (n, k) in {name}, got {ids.dtype} {ids.shape}")
    return np.array(ids)


def _array(name: str, array: str) -> np.ndarray:
    path = Path(name)
    readers: dict[str, Callable[[Path], np.ndarray]] = {
        ".npy": lambda p: np.lib.format.open_memmap(p, "r"),
        ".npz": lambda p: _read_npz(p, array),
        ".safetensors": lambda p: _read_safetensors(p, array),
        ".fvecs": lambda p: _read_vecs(p).view(np.float32),
        ".ivecs": _read_vecs,
        ".hdf5": lambda p: _read_hdf5(p, array or "train"),
    }
    if path.suffix not in readers:
        raise ValueError(f"expected a file that ends in {', '.join(readers)}, got {path}")
    try:
        return readers[path.suffix](path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except extras.MissingExtra:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a readable {path.suffix} file: {error}") from None


def _choose(names: list[str], array: str) -> str:
    if not names:
        raise ValueError("it holds no array")
    if array and array not in names:
        raise ValueError(str(unknown_name("array", array, names)))
    return array or names[0]


def _read_npz(path: Path, array: str) -> np.ndarray:
    arrays = np.load(path, allow_pickle=False)
    return arrays[_choose(arrays.files, array)]


def _read_safetensors(path: Path, array: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="flax") as tensors:  # flax: the numpy reader has no bfloat16
        tensor = tensors.get_tensor(_choose(list(tensors.keys()), array))
    return np.asarray(tensor.astype(jnp.float32) if jnp.issubdtype(tensor.dtype, jnp.floating) else tensor)


def _read_vecs(path: Path) -> np.ndarray:
    """Each row is its length as int32, then as many numbers of four bytes (.fvecs: float32, .ivecs: int32)."""
    raw = np.memmap(path, np.int32, "r")
    if raw[0] < 1 or len(raw) % (raw[0] + 1) or (raw.reshape(-1, raw[0] + 1)[:, 0] != raw[0]).any():
        raise ValueError("its vectors do not have one dimension")
    return raw.reshape(-1, raw[0] + 1)[:, 1:]


def _read_hdf5(path: Path, array: str) -> np.ndarray:
    """In the layout of ann-benchmarks: "train", "test", "neighbors", "distances"."""
    with extras.explained():
        import h5py

    with h5py.File(path) as file:
        datasets = {name: part for name, part in file.items() if isinstance(part, h5py.Dataset)}
        return datasets[_choose(list(datasets), array)][()]


WORD_DIMS, WORD_COUNT, WINDOW = 300, 15_000, 5
PINNED = Path(__file__).parent / "corpus"
"""Text of Python 3.11.7's standard library, as `pin` has written it."""
PINNED_WORDS = PINNED / "words.xz"


@functools.cache
def _words() -> np.ndarray:
    """Word vectors (words, 300): truncated SVD of positive pointwise mutual information (Levy & Goldberg, 2014).

    The corpus is `PINNED_WORDS`, so that the vectors do not depend on the running Python.
    """
    version = hashlib.sha256(PINNED_WORDS.read_bytes()).hexdigest()[:16]
    return cached(f"words-{version}-{WORD_COUNT}x{WORD_DIMS}.npy", lambda: word_vectors(pinned_words())[0])


def pinned_words() -> list[str]:
    """The words of each file of Python 3.11.7's standard library."""
    return lzma.decompress(PINNED_WORDS.read_bytes()).decode().split("\n")


def corpus() -> dict[str, str]:
    """The source files of the running Python's standard library by their paths in it, in a fixed order."""
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts and "dist-packages" not in p.parts)
    return {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8", errors="ignore") for p in files}


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]{2,}", text.lower())


def word_vectors(texts: list[str]) -> tuple[np.ndarray, dict[str, int]]:
    """Vectors of the most frequent words (WORD_COUNT, WORD_DIMS), and the row of each word."""
    documents = [words_of(text) for text in texts]
    counts = Counter(word for document in documents for word in document)
    index = {word: i for i, (word, _) in enumerate(counts.most_common(WORD_COUNT))}
    gap = [-1] * WINDOW  # no window reaches from one file into the next
    ids = np.array([i for document in documents for i in [*(index.get(word, -1) for word in document), *gap]])
    pairs = sparse.csr_matrix((len(index), len(index)))
    for offset in range(1, WINDOW + 1):
        left, right = ids[:-offset], ids[offset:]
        both = (left >= 0) & (right >= 0)
        pairs = pairs + sparse.csr_matrix((np.ones(both.sum()), (left[both], right[both])), shape=pairs.shape)
    pairs = (pairs + pairs.T).tocoo()
    totals = np.asarray(pairs.sum(axis=1)).ravel()
    information = np.log(pairs.data * pairs.data.sum() / (totals[pairs.row] * totals[pairs.col]))
    positive = information > 0
    entries = (information[positive], (pairs.row[positive], pairs.col[positive]))
    matrix = sparse.csr_matrix(entries, shape=pairs.shape)
    u, s, _ = linalg.svds(matrix, k=WORD_DIMS, v0=np.ones(len(index)))
    assert u is not None
    order = np.argsort(-s)
    return (u[:, order] * np.sqrt(s[order])).astype(np.float32), index
