"""Search of all that is within a radius."""

from typing import Any

import numpy as np

from rqjax.core import is_traced
from rqjax.search.ids import FREE, known
from rqjax.search.ranking import check_queries

FIRST, TIMES = 64, 8
"""Vectors that are found for a query at first, and how many times as many for those that have more."""
TOGETHER = 2**22
"""Vectors that are found for all queries of a search, at most, or for one query."""


def within(index: Any, queries: Any, radius: Any, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`Index.range_search`, by searches for more and more."""
    y = check_queries(index, queries, 1, None)
    if any(map(is_traced, (y, index.rows.ids))) or y.ndim != 2:
        raise ValueError(f"expected queries (m, {index.dim}) outside jit, got shape {y.shape}")
    if not isinstance(radius, int | float | np.number) or np.isnan(radius):
        raise ValueError(f"expected radius to be a number, got {radius!r}")
    none = np.zeros(0, known(index.rows.ids[:0]).dtype)
    found: list[Any] = [(np.zeros(0, np.float32), none)] * (len(y) + 1)
    y, left, most = np.asarray(y), np.arange(len(y)), len(index)
    k = min(FIRST, most)
    while len(left):
        size, more = 2 ** (max(1, TOGETHER // k).bit_length() - 1), [left[:0]]
        for start in range(0, len(left), size):
            some = left[start : start + size]
            padded = np.resize(some, 2 ** (len(some) - 1).bit_length())  # compiled for few numbers of queries
            scores, ids = (np.asarray(a)[: len(some)] for a in index.search(y[padded], k, **options))
            inside = (ids != FREE) & (scores < radius if index.metric == "l2" else scores > radius)
            for query, row, new, mask in zip(some, scores, ids, inside, strict=True):
                found[query] = row[mask], new[mask]
            more.append(some[inside.all(axis=1) & (k < most)])
        left, k = np.concatenate(more), min(TIMES * k, most)
    bounds = np.cumsum([0, *(len(ids) for _, ids in found[:-1])])
    scores, ids = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return bounds, scores, ids
