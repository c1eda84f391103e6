"""A cache as other engines see it: a pytree whose leaves have the batch in front."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from rqjax.cache.kv import KVCache
from rqjax.cache.strategy import Strategy
from rqjax.core import pytree, static
from rqjax.core.pytree import without_derived
from rqjax.rotations import Rope


class Held:
    """Fields of a cache that functions under jit take in as constants. Two are equal only if they are the same
    object."""

    def __init__(self, **fields: Any):
        self.fields = fields


@pytree
class Opaque:
    """A cache as an engine sees it: every leaf has the batch in front, so that a search through beams may repeat and
    pick sequences. The quantizers, of which there is one whatever the batch, are constants.

    gemma's sampler slices its caches and writes into them; what it takes and gives is the whole.
    """

    arrays: tuple[Array, ...]
    structure: Any = static(default=None)
    quantizers: Held = static(default=Held())

    @classmethod
    def of(cls, cache: KVCache, quantizers: Held) -> "Opaque":
        cache = dataclasses.replace(without_derived(cache), **dict.fromkeys(quantizers.fields))
        arrays, structure = jax.tree.flatten(cache)
        return cls(tuple(arrays), structure, quantizers)

    @property
    def cache(self) -> KVCache:
        return dataclasses.replace(jax.tree.unflatten(self.structure, self.arrays), **self.quantizers.fields)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the array in whose place it is: (batch, max_len, heads, head_dim)."""
        batch, heads, _, dim = self.cache.exact_keys.shape
        return batch, self.cache.max_len, heads, dim

    @property
    def at(self) -> "Opaque":
        return self

    def __getitem__(self, _: Any) -> "Opaque":
        return self

    def set(self, new: "Opaque") -> "Opaque":
        return new


def empty_caches(
    strategies: list[Strategy],
    ropes: list[Rope],
    windows: list[int | None],
    kv_heads: list[int],
    options: dict[str, Any],
) -> Callable[[int, int], dict[str, Opaque]]:
    """Returns a function of batch and length that makes the caches of a model's layers."""
    one = [
        {"key_quantizer": s.keys, "own_value_quantizer": None if s.keys is s.values else s.values} for s in strategies
    ]
    held, none = [Held(**jax.tree.map(jnp.asarray, fields)) for fields in one], Held()

    def empty(batch: int, max_len: int) -> dict[str, Opaque]:
        parts = zip(strategies, ropes, windows, kv_heads, held, strict=True)
        made = {}
        for i, (part, rope, window, heads, own) in enumerate(parts):
            cache = part.cache(batch, heads, max_len, rope=rope, sliding_window=window, **options)
            made[f"layer_{i}"] = Opaque.of(cache, none if cache.sliding_window else own)
        return made

    empty(1, 1)  # wrong options are refused at once
    return empty
