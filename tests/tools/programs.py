"""Programs of plain JAX to compile: the library's uses of each part of methods, of caches and indexes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from rqjax.learning.training import fit
from rqjax.rotations import Rope
from tests.tools.suites import distinct

DIM = 64
STRATEGIES = (
    "v2_lean",
    "v2_rotated_qjl",
    "v3_3.5",
    "v3_4+centered",
    "turboquant_trellis_2",
    "eden_4/rtn_3",
    "eden_3+turned",
    "eden_3+pre_rope",
    "kivi_2",
    "bfloat16",
)
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def x(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of_method(name: str) -> Program:
    """Encodes, decodes and takes inner products."""
    quantizer = jax.eval_shape(lambda key: rqjax.METHODS[name](key, DIM, 2.5 if "mixed" in name else 3), key())
    return _of_quantizer, (quantizer, x(256, DIM))


def of_fitted(name: str) -> Program:
    some = jnp.asarray(np.random.default_rng(0).standard_normal((512, DIM)), jnp.float32)
    return _of_quantizer, (rqjax.FITTED[name](jax.random.key(0), some, 2), x(256, DIM))


def _of_quantizer(quantizer: Any, vectors: Any) -> Any:
    codes = quantizer.encode(vectors)
    return codes, quantizer.decode(codes), quantizer.dot(vectors[:4], codes)


def of_cache(name: str) -> Program:
    """Appends, and attends with a window and a soft limit."""
    rope = Rope(1e4) if "turned" in name or "pre_rope" in name else None

    def make(key: Any) -> Any:
        return rqjax.strategy(name, key, DIM).cache(2, 2, 512, rope=rope)

    def run(cache: Any, k: Any, v: Any, q: Any) -> Any:
        cache = rqjax.append(cache, k, v)
        return cache, rqjax.attend(cache, q, sliding_window=300, softcap=30.0)

    return run, (jax.eval_shape(make, key()), x(2, 130, 2, DIM), x(2, 130, 2, DIM), x(2, 1, 4, DIM))


def of_pages() -> Program:
    def run(cache: Any, k: Any, v: Any, q: Any) -> Any:
        cache = rqjax.append(cache, k, v)
        return cache, rqjax.attend(cache, q)

    make = lambda key: rqjax.strategy("eden_4", key, DIM).cache(2, 2, 512, pages=8)  # noqa: E731
    return run, (jax.eval_shape(make, key()), x(2, 130, 2, DIM), x(2, 130, 2, DIM), x(2, 1, 4, DIM))


def of_search(name: str) -> Program:
    some = jnp.asarray(np.random.default_rng(0).standard_normal((2048, DIM)), jnp.float32)
    index = rqjax.Index.build(rqjax.METHODS[name](jax.random.key(0), DIM, 3), some)
    return (lambda index, y: index.search(y, 5)), (index, x(16, DIM))


def of_training() -> Program:
    quantizer = jax.eval_shape(lambda key: rqjax.METHODS["rotorquant"](key, DIM, 3), key())

    def train(quantizer: Any, x: Any, key: Any) -> Any:
        return fit(quantizer, x, key, where=lambda q: q.inner.rotation, steps=20, batch_size=16)

    return train, (quantizer, x(64, DIM), key())


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{f"method {name}": lambda name=name: of_method(name) for name in distinct(rqjax.METHODS)},
    **{f"fitted {name}": lambda name=name: of_fitted(name) for name in distinct(rqjax.FITTED)},
    **{f"cache {name}": lambda name=name: of_cache(name) for name in STRATEGIES},
    "cache in pages": of_pages,
    **{f"search {name}": lambda name=name: of_search(name) for name in ("turboquant", "turboquant_trellis", "affine")},
    "training": of_training,
}
