"""Searches an index on a mesh of devices and compares what it finds with the same index as a whole.

python tests/tools/mesh_search.py PROCESSES RANK PORT
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh

import rqjax

processes, rank, port = map(int, sys.argv[1:])
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # jax 0.5 has no default on CPUs
    jax.distributed.initialize(f"localhost:{port}", processes, rank)
assert len(jax.devices()) == 8
METRICS = ("ip", "l2")[processes - 1 :]  # two processes, which share a core in tests, take one

x, queries = (jax.random.normal(jax.random.key(i), (n, 64)) for i, n in enumerate((1003, 20)))
x, queries = np.asarray(x), np.asarray(queries)
ids = np.random.default_rng(0).permutation(5000)[: len(x)]
parts = np.split(np.arange(len(x)), [600] if processes == 2 else [])


def ordered(ids, scores):
    """Returns ids; among scores that are equal but for rounding, the least comes first."""
    ids, scores = np.array(ids), np.asarray(scores)
    for row, keys in zip(ids.reshape(-1, ids.shape[-1]), scores.reshape(-1, ids.shape[-1]), strict=True):
        with np.errstate(invalid="ignore"):
            begins = np.cumsum(np.append(True, np.abs(np.diff(keys)) > 3e-6 * np.abs(keys[1:])))
        row[:] = row[np.lexsort((row, begins))]
    return ids


quantizer = rqjax.Centered(jax.numpy.asarray(x.mean(axis=0)), rqjax.turboquant_trellis(jax.random.key(2), 64, 3))
for metric in METRICS:
    options = {"metric": metric, "store": rqjax.Exact(64, "float16")}
    whole = rqjax.Index.build(quantizer, x, ids=ids, **options)
    own = rqjax.Index.build(quantizer, x[parts[rank]], ids=ids[parts[rank]], **options)
    own = own.remove(ids[parts[rank]][:2])
    whole = whole.remove(np.concatenate([ids[part][:2] for part in parts]))
    shards = own.shard(Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "copies")), "rows")
    assert len(shards) == len(whole) == len(x) - 2 * processes
    mask = np.random.default_rng(1).random(5000) < 0.5
    cases = [(10, 40, None), (300, None, mask), (10, None, ids[2:5])]
    if metric == "ip":
        cases += [(10, None, None), (300, None, None), (300, 400, ids[:500])]
        cases += [(10, None, range(5, 4000, 3)), (10, None, [])]
    for k, rerank, where in cases:
        options = {"rerank": rerank, "where": where}
        # rows are scored in groups or one by one, as there are many or few: sums are rounded in another order
        (scores, found), (expected, nearest) = (i.search(queries, k, **options) for i in (shards, whole))
        np.testing.assert_allclose(np.asarray(scores), np.asarray(expected), rtol=1e-6, atol=1e-6)
        found, nearest = ordered(found, scores), ordered(nearest, expected)
        np.testing.assert_array_equal(found, nearest)
    y = jax.device_put(queries, jax.local_devices()[0])  # on one device of the mesh
    for one, other in zip(shards.searcher(10, rerank=40)(y), shards.search(y, 10, rerank=40), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)
ids = ids * 2**33 + ids  # beyond 32 bits
residuals = rqjax.turboquant_trellis(jax.random.key(2), 64, 3)
for metric in METRICS:
    options = {"metric": metric, "store": rqjax.Exact(64, "float16"), "key": jax.random.key(3)}
    whole = rqjax.Index.build(residuals, x, ids=ids, lists=37, **options)
    own = whole.remove(np.delete(ids, parts[rank]))
    shards = own.shard(Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "copies")), "rows")
    assert len(shards) == len(whole) == len(x)
    cases = [(10, 20, 40, None), (10, 10, None, range(5, 2**45, 3))]
    if metric == "ip":
        cases += [(10, 5, None, None), (300, 37, None, None), (1, 1, None, None), (10, 37, None, ids[2:5])]
    for k, probes, rerank, where in cases:
        options = {"probes": probes, "rerank": rerank, "where": where}
        for expected, found in zip(
            whole.search(queries, k, **options), shards.search(queries, k, **options), strict=True
        ):
            # products near 0 are differences of terms of size 10
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6, atol=1e-6)
if processes == 2:  # each one's vectors have another mean
    own = rqjax.Index.build(rqjax.Exact(64), x[parts[rank]], metric="l2")
    refused = ""
    try:
        own.shard(Mesh(np.array(jax.devices()), "rows"), "rows")
    except ValueError as error:
        refused = str(error)
    assert "expected the same quantizers and centers in all processes" in refused
print("the same")
