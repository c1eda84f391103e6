"""Writes the files beside it, one of each kind that rqjax writes, and what was computed from them.

    python tests/written/make.py

They were written before the modules of rqjax moved into rooms, and stand for files that users have: never write them
anew to get a test green.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import rqjax

FOLDER = Path(__file__).parent
DIM = 32
STRATEGIES = ("v2_lean", "v2_rotated_qjl", "v3_2.5/turboquant_prod_3+centered", "turboquant_trellis_2")
METRICS = ("ip", "l2", "cosine")


def vectors(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * jnp.linspace(0.5, 2, shape[-1])


def quantizers():
    x = vectors(1, 256, DIM)
    made = {name: make(jax.random.key(2), DIM, 3) for name, make in rqjax.METHODS.items()}
    made |= {name: fit(jax.random.key(3), x, 2) for name, fit in rqjax.FITTED.items()}
    budgeted = {"rtn": 8, "l1c10p0.7+p0.3": 4, "lopq": 2}
    made |= {f"{name}_budget": rqjax.fit_under_budget(name, jax.random.key(4), x, r)[0] for name, r in budgeted.items()}
    made["qjl"] = rqjax.Sign.hadamard(jax.random.key(5), DIM)
    made["centered"] = rqjax.Centered(x.mean(axis=0), made["rotorquant"])
    made["exact"] = rqjax.Exact(DIM, "bfloat16")
    heads = jnp.stack([x, 2 * x[::-1]])
    made["heads"] = rqjax.rotor_chain_learned(jax.random.key(6), heads, 2)
    return made


def cache(name):
    k, v = vectors(7, 2, 50, 1, DIM), vectors(8, 2, 50, 1, DIM)
    empty = rqjax.strategy(name, jax.random.key(9), DIM).cache(2, 1, max_len=64, window=8, sinks=2)
    return jax.jit(rqjax.append)(empty, k, v, valid=jnp.array([50, 37]))


@jax.jit
def attended(cache):
    """Attention to what a cache holds, and to 9 tokens more."""
    q, more = vectors(10, 2, 1, 4, DIM), vectors(11, 2, 9, 1, DIM)
    return rqjax.attend(cache, q), rqjax.attend(rqjax.append(cache, more, more), q)


def index(metric):
    quantizer = rqjax.turboquant_prod(jax.random.key(10), DIM, 3)
    made = rqjax.Index.build(quantizer, vectors(11, 100, DIM), metric=metric, store=rqjax.Exact(DIM, "float16"))
    return made.remove([3, 5])


def training(checkpoint, progress=None):
    start = rqjax.rotorquant(jax.random.key(12), DIM, 3)
    return rqjax.fit(
        start,
        vectors(13, 200, DIM),
        jax.random.key(14),
        where=lambda q: q.inner.rotation,
        steps=20,
        evaluations=4,
        checkpoint=checkpoint,
        progress=progress,
    )[0]


def stop_halfway(row):
    if row["step"] >= 10:
        raise InterruptedError


def main():
    results = {}

    def keep(name, *arrays):
        results.update({f"{name}/{i}": np.asarray(array) for i, array in enumerate(arrays)})

    x, y = vectors(15, 8, DIM), vectors(16, 2, DIM)
    pairs = []
    for name, quantizer in quantizers().items():
        given = jnp.stack([x, x]) if name == "heads" else x
        codes = jax.jit(rqjax.encode)(quantizer, given)
        pairs.append((name, quantizer, codes))
        keep(name, jax.jit(rqjax.decode)(quantizer, codes))
    rqjax.save(tuple(pairs), FOLDER / "quantizers.safetensors")
    for name in STRATEGIES:
        full = cache(name)
        rqjax.save(full, FOLDER / f"cache-{name.replace('/', '-')}.safetensors")
        keep(name, *attended(full))
    for metric in METRICS:
        made = index(metric)
        made.save(FOLDER / f"index-{metric}.safetensors")
        keep(metric, *made.search(y, 5, rerank=10))
    file = FOLDER / "training.safetensors"
    try:
        training(file, stop_halfway)
    except InterruptedError:
        before = file.read_bytes()
    keep("training", training(file).inner.rotation.bivectors)
    file.write_bytes(before)
    np.savez_compressed(FOLDER / "results.npz", **results)


if __name__ == "__main__":
    main()
