"""Strategies of fewer bits, with which an engine encodes its cache again when pages run out."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from rqjax.cache.kv import KVCache
from rqjax.cache.requantize import requantize
from rqjax.cache.strategy import Strategy
from rqjax.core import nbytes


def level(
    decoder: Any, name: Any, key: Array, caches: Sequence[KVCache], room: int, options: dict[str, Any]
) -> tuple[Any, list[Strategy], int]:
    """Returns a name, its strategy of each layer, and how many of its pages fit in the bytes of those of `caches`."""
    size = lambda layers: sum(nbytes((layer.keys, layer.values)) for layer in layers)  # noqa: E731
    one = decoder.caches(name, key, 1, room, pages=1, **options)
    layers = [
        Strategy(layer.key_quantizer, layer.own_value_quantizer or layer.key_quantizer, layer.key_form) for layer in one
    ]
    pages = size(caches) // size(one)
    jax.eval_shape(lambda: [requantize(*pair) for pair in zip(caches, layers, strict=True)])  # raises unless they fit
    return name, layers, pages
