"""Exact search in NumPy's float64, of differences and not of products: what every search is compared with."""

import numpy as np


def scores(x, queries, metric):
    """Inner products, cosines or squared distances (m, n)."""
    x, queries = np.asarray(x, np.float64), np.asarray(queries, np.float64)
    if metric == "cosine":
        x, queries = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, queries))
    if metric == "l2":
        return np.stack([((x - y) ** 2).sum(axis=1) for y in queries])
    return queries @ x.T


def nearest(x, queries, metric, k):
    """Scores and rows (m, k) of the nearest, the nearest first."""
    found = scores(x, queries, metric)
    rows = np.argsort(found if metric == "l2" else -found, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(found, rows, axis=1), rows


def around_a_mean(ratio, count=2000, dim=64, seed=0):
    """Vectors and 50 queries with a mean of so many spreads; 12 of 64 directions have most of the rest."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((count + 50, 12)) @ rng.standard_normal((12, dim)) / 2
    x, mean = x + rng.standard_normal(x.shape) * 0.4, rng.standard_normal(dim)
    x = x + ratio * mean * np.sqrt((x**2).sum(1).mean() / (mean**2).sum())
    return x[:count].astype(np.float32), x[count:].astype(np.float32)
