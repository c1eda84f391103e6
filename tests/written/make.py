"""Writes the file beside it: one of each kind of what rqjax saves, and what was computed from it.

    python -m tests.written.make

It stands for files that users have: it is written anew with the number of the format (`treefile.FORMAT`) only.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import rqjax

FILE = Path(__file__).with_name("today.safetensors")
DIM = 32
RECIPES = ("turboquant_prod", "affine", "nested_e8", "rotorquant_trellis", "eden_unbiased", "isoquant")
STRATEGIES = ("v2_lean", "v3_2.5/turboquant_prod_3+centered", "turboquant_trellis_2", "eden_3+turned")


def vectors(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * jnp.linspace(0.5, 2, shape[-1])


def quantizers():
    made = {name: rqjax.METHODS[name](jax.random.key(2), DIM, 3) for name in RECIPES}
    made["klt_trellis"] = rqjax.klt_trellis(jax.random.key(3), vectors(1, 256, DIM), 2)
    made["lopq"] = rqjax.lopq(jax.random.key(5), vectors(1, 256, DIM), 2)
    return made | {"pq": rqjax.fit_under_budget("l1c10p0.7+p0.3", jax.random.key(4), vectors(1, 256, DIM), 4)[0]}


def cache(name):
    k, v = vectors(7, 2, 50, 1, DIM), vectors(8, 2, 50, 1, DIM)
    rope = {"rope": rqjax.Rope(1e4)} if "+turned" in name else {}
    empty = rqjax.strategy(name, jax.random.key(9), DIM).cache(2, 1, max_len=64, window=8, sinks=2, **rope)
    return jax.jit(rqjax.append)(empty, k, v, valid=jnp.array([50, 37]))


def index():
    quantizer = rqjax.turboquant_prod(jax.random.key(10), DIM, 3)
    made = rqjax.Index.build(quantizer, vectors(11, 100, DIM), metric="l2", store=rqjax.Exact(DIM, "float16"))
    return made.remove([3, 5])


@jax.jit
def attended(cache):
    """Attention to what a cache holds, and to 9 tokens more."""
    q, more = vectors(10, 2, 1, 4, DIM), vectors(11, 2, 9, 1, DIM)
    return rqjax.attend(cache, q), rqjax.attend(rqjax.append(cache, more, more), q)


def computed(codes, caches, index):
    x = vectors(15, 8, DIM)
    return {
        "errors": {
            name: ((x - rqjax.decode(quantizer, rqjax.encode(quantizer, x))) ** 2).sum(-1)
            for name, (quantizer, _) in codes.items()
        },
        "decoded": {name: rqjax.decode(quantizer, code) for name, (quantizer, code) in codes.items()},
        "attended": {name: attended(cache) for name, cache in caches.items()},
        "found": index.search(vectors(16, 2, DIM), 5, rerank=10),
    }


def main():
    x = vectors(15, 8, DIM)
    codes = {name: (quantizer, rqjax.encode(quantizer, x)) for name, quantizer in quantizers().items()}
    parts = codes, {name: cache(name) for name in STRATEGIES}, index()
    rqjax.save((*parts, computed(*parts)), FILE)


if __name__ == "__main__":
    main()
