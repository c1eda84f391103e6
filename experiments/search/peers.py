"""FAISS's and turbovec's codecs, as one would use them in the place of rqjax, behind one interface.

Each builds an index over all of x (n, d), training included, and searches it by inner product. FAISS scores queries as
they are, turbovec rounds them. Ids are rows of x; where k exceeds n, FAISS fills up with -1 and turbovec returns n ids.
"""

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rqjax.core import extras

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else FAISS's idle threads spin into the next measurement

CALIBRATION = 1024
"""Rows that turbovec is calibrated on, as its documentation recommends."""

PART = 100
"""Coordinates that `faiss_prq` quantizes together at most."""


class Peer(NamedTuple):
    """An index. One more vector adds `bytes_per_vector`, its factors included. Centroids and rotations, which it holds
    before the first one, take `shared_bytes`. `search` takes (queries, k) to (scores, ids)."""

    bytes_per_vector: float
    shared_bytes: int
    search: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def faiss_pq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Groups of 8 / bits coordinates with 256 centroids each, learned on at most 65,536 vectors."""
    return _peer(_product("faiss_pq", x.shape[1], bits, seed), x)


def faiss_fastscan(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Groups of 4 / bits coordinates with 16 centroids each, scored in registers with tables rounded to 8 bits."""
    _check_bits("faiss_fastscan", bits, (1, 2, 4))
    faiss, d = library("faiss"), x.shape[1]
    index = faiss.IndexPQFastScan(d, d * bits // 4, 4, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = seed
    return _peer(index, x)


def faiss_opq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Codes of `faiss_pq` after a rotation that is learned with them, on at most 65,536 vectors."""
    faiss, d = library("faiss"), x.shape[1]
    index = _product("faiss_opq", d, bits, seed)
    rotation, inner = faiss.OPQMatrix(d, index.pq.M), faiss.ProductQuantizer(d, index.pq.M, 8)
    # It has no seed, but starts from the matrix that it holds, and from a fixed one only if it holds none.
    start = _rotation(d, seed)  # named, since its A does not keep it alive
    faiss.copy_array_to_vector(faiss.vector_to_array(start.A), rotation.A)
    inner.cp.seed, rotation.pq = seed, inner
    rotation.train(x)
    rotation.pq = None  # `inner` is freed on return
    return _peer(faiss.IndexPreTransform(rotation, index), x)


def faiss_rq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """A residual quantizer of whole vectors: of bits d / 8 levels with 256 centroids each."""
    return _residual("faiss_rq", x, bits, seed, parts=1)


def faiss_prq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """A residual quantizer for each part of the coordinates, at most `PART` of them. It finds less than a quantizer of
    whole vectors, and trains in less time."""
    d = x.shape[1]
    parts = next((n for n in range(-(-d // PART), d + 1) if d % n == 0 and d * bits % (8 * n) == 0), d)
    return _residual("faiss_prq", x, bits, seed, parts)


def faiss_lsq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """A local-search quantizer of four times 256 centroids for each group of 32 / bits coordinates; larger groups train
    for a quarter of an hour and more."""
    _check_bits("faiss_lsq", bits, (1, 2, 4, 8))
    faiss, d = library("faiss"), x.shape[1]
    if d * bits % 32:
        raise ValueError(f"faiss_lsq at {bits} bits takes multiples of {32 // bits} dimensions, got {d}")
    kind = faiss.AdditiveQuantizer.ST_LUT_nonorm
    index = faiss.IndexProductLocalSearchQuantizer(d, d * bits // 32, 4, 8, faiss.METRIC_INNER_PRODUCT, kind)
    for part in range(d * bits // 32):
        faiss.downcast_AdditiveQuantizer(index.plsq.subquantizer(part)).random_seed = 100 * seed + part
    return _peer(index, x)


def faiss_tqmse(x: np.ndarray, bits: int, seed: int) -> Peer:
    """TurboQuant's codebooks after a random rotation; stores no norms, so x has to be of unit vectors."""
    _check_bits("faiss_tqmse", bits, (1, 2, 3, 4, 8))
    if np.abs(np.einsum("nd,nd->n", x, x) - 1).max() > 0.01:
        raise ValueError("faiss_tqmse takes unit vectors only")
    return _rotated(_scalar(x.shape[1], f"QT_{bits}bit_tqmse"), x, seed)


def faiss_tq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """TurboQuant of bits - 1 and a sign sketch of its residual, with both norms; the sketch's seed is FAISS's own."""
    _check_bits("faiss_tq", bits, (2, 3, 4, 5))
    return _rotated(_scalar(x.shape[1], f"QT_{bits}bit_tq"), x, seed)


def faiss_eden(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Lloyd-Max codebooks for a normal distribution with an unbiased scale a vector, about the mean of x."""
    _check_bits("faiss_eden", bits, range(1, 9))
    faiss = library("faiss")
    return _rotated(faiss.IndexEDEN(x.shape[1], faiss.METRIC_INNER_PRODUCT, bits), x, seed)


def faiss_rabitq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Multi-bit RaBitQ about the mean of x; a bound from the signs decides which vectors are scored with all bits.

    FastScan finds the same in 0.4 to 0.8 of the time. But it rounds queries, and one bit has nothing else to score by.
    And its sums of 16 bits overflow: in 2,560 dimensions it still finds the same, in 3,072 two of ten neighbors.
    """
    _check_bits("faiss_rabitq", bits, range(1, 10))
    faiss, d = library("faiss"), x.shape[1]
    if bits == 1 or d > 2048:
        index = faiss.IndexRaBitQ(d, faiss.METRIC_INNER_PRODUCT, bits)
        index.qb = 0
    else:
        index = faiss.IndexRaBitQFastScan(d, faiss.METRIC_INNER_PRODUCT, 32, bits)  # 32 vectors at a time
        index.qb = 8
    return _rotated(index, x, seed)


def faiss_sq(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Uniform levels between the extremes of each coordinate; nothing in it is random."""
    _check_bits("faiss_sq", bits, (4, 6, 8))
    return _peer(_scalar(x.shape[1], f"QT_{bits}bit"), x)


def turbovec(x: np.ndarray, bits: int, seed: int) -> Peer:
    """TurboQuant with an unbiased scale a vector; its rotation depends on d alone, so the seed changes nothing."""
    return _turbovec_peer(_turbovec("turbovec", x.shape[1], bits), x)


def turbovec_calibrated(x: np.ndarray, bits: int, seed: int) -> Peer:
    """Codes of `turbovec` with a shift and a scale for each coordinate, fitted to a sample that the seed draws."""
    index = _turbovec("turbovec_calibrated", x.shape[1], bits)
    rows = np.random.default_rng(seed).choice(len(x), min(CALIBRATION, len(x)), replace=False)
    index.calibrate(np.ascontiguousarray(x[rows], np.float32))
    return _turbovec_peer(index, x)


PEERS: dict[str, Callable[[np.ndarray, int, int], Peer]] = {
    "faiss_pq": faiss_pq,
    "faiss_fastscan": faiss_fastscan,
    "faiss_opq": faiss_opq,
    "faiss_rq": faiss_rq,
    "faiss_prq": faiss_prq,
    "faiss_lsq": faiss_lsq,
    "faiss_tqmse": faiss_tqmse,
    "faiss_tq": faiss_tq,
    "faiss_eden": faiss_eden,
    "faiss_rabitq": faiss_rabitq,
    "faiss_sq": faiss_sq,
    "turbovec": turbovec,
    "turbovec_calibrated": turbovec_calibrated,
}
"""Functions of (x, bits, seed), by name."""


def _residual(name: str, x: np.ndarray, bits: int, seed: int, parts: int) -> Peer:
    """A residual quantizer of 256 centroids a level for each of the parts of the coordinates.

    Centroids of whole parts and no beam in training find more than FAISS's defaults, in a seventieth of the time; the
    beam of encoding is the default.
    """
    _check_bits(name, bits, (1, 2, 4, 8))
    faiss, d = library("faiss"), x.shape[1]
    if d % parts or d * bits % (8 * parts):
        raise ValueError(f"{name} at {bits} bits takes multiples of {8 // bits} dimensions, got {d}")
    kind = faiss.AdditiveQuantizer.ST_LUT_nonorm  # the scores of decoded vectors, ten times as fast
    index = faiss.IndexProductResidualQuantizer(d, parts, d * bits // 8 // parts, 8, faiss.METRIC_INNER_PRODUCT, kind)
    inner = [faiss.downcast_AdditiveQuantizer(index.prq.subquantizer(part)) for part in range(parts)]
    beam = inner[0].max_beam_size
    for quantizer in inner:
        quantizer.cp.seed, quantizer.train_type, quantizer.max_beam_size = seed, quantizer.Train_default, 1
    index.train(x)
    for quantizer in inner:
        quantizer.max_beam_size = beam
    return _peer(index, x)


def library(name: str) -> Any:
    """faiss or turbovec."""
    with extras.explained():
        return importlib.import_module(name)


def _check_bits(name: str, bits: int, supported: Sequence[int]) -> None:
    if bits not in supported:
        raise ValueError(f"{name} has {', '.join(map(str, supported))} bits, got {bits}")


def _product(name: str, d: int, bits: int, seed: int) -> Any:
    _check_bits(name, bits, (1, 2, 4, 8))
    if d * bits % 8:
        raise ValueError(f"{name} at {bits} bits takes multiples of {8 // bits} dimensions, got {d}")
    faiss = library("faiss")
    index = faiss.IndexPQ(d, d * bits // 8, 8, faiss.METRIC_INNER_PRODUCT)
    index.pq.cp.seed = seed
    return index


def _scalar(d: int, kind: str) -> Any:
    faiss = library("faiss")
    return faiss.IndexScalarQuantizer(d, getattr(faiss.ScalarQuantizer, kind), faiss.METRIC_INNER_PRODUCT)


def _rotation(d: int, seed: int) -> Any:
    rotation = library("faiss").RandomRotationMatrix(d, d)
    rotation.init(seed)
    return rotation


def _rotated(index: Any, x: np.ndarray, seed: int) -> Peer:
    return _peer(library("faiss").IndexPreTransform(_rotation(x.shape[1], seed), index), x)


def _peer(index: Any, x: np.ndarray) -> Peer:
    if not index.is_trained:
        index.train(x)
    shared = library("faiss").serialize_index(index).nbytes
    index.add(x)
    return Peer(float(index.sa_code_size()), shared, index.search)


def _turbovec(name: str, d: int, bits: int) -> Any:
    _check_bits(name, bits, (2, 4))
    if d % 8:
        raise ValueError(f"{name} takes multiples of 8 dimensions, got {d}")
    return library("turbovec").TurboQuantIndex(dim=d, bit_width=bits)


def _turbovec_peer(index: Any, x: np.ndarray) -> Peer:
    shared = len(index.to_bytes())
    index.add(np.ascontiguousarray(x, np.float32))
    index.prepare()  # else the first search lays out the codes
    search = lambda queries, k: index.search(np.ascontiguousarray(queries, np.float32), k)  # noqa: E731
    return Peer(_turbovec_bytes(index), shared, search)


def _turbovec_bytes(index: Any) -> float:
    """Measures what a second block adds, by vector: turbovec has no code_size, and serializes blocks of 32 vectors."""
    block, sizes = np.eye(32, index.dim, dtype=np.float32), []
    small = type(index)(dim=index.dim, bit_width=index.bit_width)
    for _ in range(2):
        small.add(block)
        sizes.append(len(small.to_bytes()))
    return (sizes[1] - sizes[0]) / len(block)
