"""Parts that the search experiments share: vectors and queries, true neighbors, indexes of this library and of others.

A codec is a name of `METHODS`, `FITTED` or `peers.PEERS`. With a suffix, a vector of this library takes d b / 8 bytes,
as with product quantization: ":tight" gives as many bits less as a scale takes, ":unit" stores no scale. ":centered"
subtracts the mean of all vectors, and ":l2" also ranks by squared distances. A mean, which an index may subtract
unasked, costs a vector 4 bytes more. Distances cost as much, and both together no more than either.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.data import samples
from experiments.search.peers import PEERS, Peer, library
from rqjax.core import unknown_name

BLOCK = 2**24
"""Inner products that are held at a time."""


def sets(name: str, seeds: int, n: int, queries: int, dim: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws for each seed unit vectors (n, dim), or as many as there are, and others (queries, dim) of the same set."""
    x = np.asarray(samples.sample(name, seeds, n + queries, dim))
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    return [(np.ascontiguousarray(one[queries:]), np.ascontiguousarray(one[:queries])) for one in x]


def unit(n: int, dim: int, seed: int) -> np.ndarray:
    """Uniform unit vectors, by NumPy: jax then holds no memory but the index's."""
    x = np.random.default_rng(seed).standard_normal((n, dim), np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def neighbours(x: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """Finds the rows of the k largest inner products of each query, the largest first."""
    size = max(1, BLOCK // len(x))
    blocks = (queries[start : start + size] @ x.T for start in range(0, len(queries), size))
    return np.concatenate([np.argsort(-block, axis=1, kind="stable")[:, :k] for block in blocks])


def quantizer(codec: str, x: np.ndarray, bits: int, seed: int) -> Any:
    """A quantizer of this library for vectors x."""
    name, _, suffix = codec.partition(":")
    dim, key = x.shape[1], jax.random.key(seed)
    exact = bits - 16 / dim if suffix == "tight" else bits
    fitted = name in rqjax.FITTED
    mean = x.mean(axis=0) if suffix in ("centered", "l2") else None
    x = x if mean is None else x - mean
    # A key of its own: the mean of `samples.clustered` is of key 1, and a rotation of those numbers tripled its error.
    method_key = jax.random.fold_in(key, dim)
    code = rqjax.FITTED[name](key, jnp.asarray(x), exact) if fitted else rqjax.METHODS[name](method_key, dim, exact)
    code = code.inner if suffix == "unit" else code
    return code if mean is None else rqjax.Centered(jnp.asarray(mean), code)


def build(codec: str, x: np.ndarray, bits: int, seed: int) -> Peer:
    """An index of x, trained and filled; bytes of a vector are all that is stored of it but its id."""
    if codec in PEERS:
        return PEERS[codec](x, bits, seed)
    index = rqjax.Index.build(quantizer(codec, x, bits, seed), x, metric="l2" if codec.endswith(":l2") else "ip")
    jax.block_until_ready(index.rows)

    def search(queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, ids = index.search(queries, k)
        return np.asarray(scores), np.asarray(ids)

    stored = rqjax.nbytes((index.rows.codes, index.rows.energies))
    return Peer(stored / len(x), rqjax.nbytes((index.quantizer, index.center)), search)


def check(codec: str) -> None:
    """Raises for a codec that does not exist."""
    name, _, suffix = codec.partition(":")
    names = [*rqjax.METHODS, *rqjax.FITTED, *PEERS]
    if name not in names or suffix not in ("", "tight", "unit", "centered", "l2"):
        raise unknown_name("codec", codec, names)
    if name in PEERS:
        library(name.partition("_")[0])
