"""Caches by name: which quantizers hold keys and values."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rqjax.cache.kv import KVCache
from rqjax.core import Quantizer, nbytes, unknown_name
from rqjax.quantizers.combinators import Residual
from rqjax.quantizers.exact import Exact
from rqjax.recipes import methods
from rqjax.recipes.sketches import Sign


class Strategy(NamedTuple):
    """The quantizers of a cache, and whether the mean key is subtracted.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.strategy("eden_4", jax.random.key(0), dim=64).nbytes(batch=1, kv_heads=2, max_len=4096)
      631833
    """

    keys: Quantizer
    values: Quantizer
    centered: bool = False

    def cache(self, batch: int, kv_heads: int, max_len: int, **options: Any) -> KVCache:
        """An empty cache; `options` as in `KVCache.init`. What is to be stored in float32 is so in the window, too."""
        full = [part.dtype for part in (self.keys, self.values) if isinstance(part, Exact)]
        dtype = jnp.promote_types(*full) if len(full) == 2 else jnp.bfloat16
        options = {"centered": self.centered, "dtype": dtype, **options}
        return KVCache.init(batch, kv_heads, max_len, self.keys, self.values, **options)

    def nbytes(self, batch: int, kv_heads: int, max_len: int, **options: Any) -> int:
        """Bytes of the cache that `cache` would make, of which none is made: codes, window, quantizers, everything."""
        return nbytes(jax.eval_shape(lambda: self.cache(batch, kv_heads, max_len, **options)))


def _v2_rotated_qjl(key: Array, dim: int, sketch: Callable[[Array, int], Quantizer]) -> Strategy:
    """QJL corrects scores; the values do without."""
    first, second = jax.random.split(key)
    values = methods.affine_rotated(first, dim, 3)
    return Strategy(Residual(values, sketch(second, dim)), values)


def _v3(key: Array, dim: int, bits: float | int) -> Strategy:
    return _same(methods.turboquant_mixed(key, dim, bits))


def _same(quantizer: Quantizer) -> Strategy:
    return Strategy(quantizer, quantizer)


STRATEGIES: dict[str, Callable[[Array, int], Strategy]] = {
    "float32": lambda key, dim: _same(Exact(dim, "float32")),
    "bfloat16": lambda key, dim: _same(Exact(dim, "bfloat16")),
    "v2_lean": lambda key, dim: _same(methods.affine(key, dim, 4)),
    "v2_rotated": lambda key, dim: _same(methods.affine_rotated(key, dim, 4)),
    "v2_rotated_qjl": lambda key, dim: _v2_rotated_qjl(key, dim, Sign.gaussian),
    "v2_rotated_qjl_orthogonal": lambda key, dim: _v2_rotated_qjl(key, dim, Sign.orthogonal),
    **{f"v3_{b:g}": (lambda key, dim, b=b: _v3(key, dim, b)) for b in (2, 2.5, 2.75, 3, 3.25, 3.5, 4)},
}
"""TurboQuant MLX's strategies by their names there (V2: affine groups of 64; V3: Lloyd-Max), QJL with an orthogonal
sketch in the place of the Gaussian one, and no quantization."""


def strategy(name: str, key: Array, dim: int) -> Strategy:
    """The strategy of a name, for heads of `dim` dimensions.

    A name is one of `STRATEGIES`, or an entry of `METHODS`, with `_<bits>` behind it for other than 4 bits
    ("rotorquant_3"). "a/b" takes the keys of a and the values of b; "+centered" behind it subtracts the mean key.

    Raises:
      UnknownName: there is no such strategy; the nearest names are given.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.strategy("eden_4/v3_2+centered", jax.random.key(0), dim=64).centered
      True
    """
    base, plus, option = name.partition("+")
    if plus and option != "centered":
        raise unknown_name(f"option of the strategy {base!r}", option, ["centered"])
    parts = [_one(part, key, dim) for part in base.split("/")]
    if len(parts) > 2:
        raise ValueError(f"expected a strategy, or one for keys and one for values with '/' between, got {name!r}")
    return Strategy(parts[0].keys, parts[-1].values, bool(plus))


def _one(name: str, key: Array, dim: int) -> Strategy:
    if name in STRATEGIES:
        return STRATEGIES[name](key, dim)
    match = re.fullmatch(r"(\w+?)(?:_(\d+(?:\.\d+)?))?", name)
    if match is None or match[1] not in methods.METHODS:
        raise unknown_name("strategy", name, _names())
    bits = float(match[2] or 4)
    return _same(methods.METHODS[match[1]](key, dim, int(bits) if bits == int(bits) else bits))


def _names() -> list[str]:
    return [*STRATEGIES, *methods.METHODS]
