"""Vectors of words, and the text of Python's own library that they are learned from."""

import functools
import hashlib
import lzma
import re
from collections import Counter
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.sparse import linalg

from experiments.harness.cache import cached

WORD_DIMS, WORD_COUNT, WINDOW = 300, 15_000, 5
PINNED = Path(__file__).parents[1] / "corpus"
"""Text of Python 3.11.7's standard library, as `pin` has written it."""
PINNED_WORDS = PINNED / "words.xz"


@functools.cache
def vectors() -> np.ndarray:
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
