"""Strategies of fewer bits, with which an engine encodes its cache again when pages run out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from rqjax.cache.kv import KVCache
from rqjax.cache.requantize import requantize
from rqjax.cache.strategy import Strategy
from rqjax.core import nbytes


def levels(
    decoder: Any,
    names: Sequence[Any],
    key: Array,
    caches: Sequence[KVCache],
    pages: int,
    room: int,
    options: dict[str, Any],
) -> list[tuple[Any, list[Strategy], int]]:
    """Returns each name, its strategy of each layer, and how many of its pages fit in the bytes of those of `caches`.

    Raises:
      ValueError: texts are too short for codes, or a strategy has no fewer bits than the one before.
    """
    found = [_level(decoder, name, key, caches, room, options) for name in names]
    counts = [pages, *(one[-1] for one in found)]
    if sorted(set(counts)) != counts:
        raise ValueError(f"expected degrade= of fewer and fewer bits, got strategies of {counts} pages")
    return found


def _level(
    decoder: Any, name: Any, key: Array, caches: Sequence[KVCache], room: int, options: dict[str, Any]
) -> tuple[Any, list[Strategy], int]:
    size = lambda layers: sum(nbytes((layer.keys, layer.values)) for layer in layers)  # noqa: E731
    boundary, options = options.get("boundary", 0), {k: v for k, v in options.items() if k != "boundary"}
    layers = decoder.strategies(name, key, boundary, options.get("dtype"))
    layers = [
        dataclasses.replace(layer, key_form=layer.key_form.at(rope))
        for layer, rope in zip(layers, decoder.config.ropes, strict=True)
    ]
    in_pages = [layer for layer, cache in zip(layers, caches, strict=True) if not cache.sliding_window]
    one = [layer.cache(1, decoder.config.num_key_value_heads, room, pages=1, **options) for layer in in_pages]
    if not size(one):
        raise ValueError(f"degrade= has no codes to make anew: all {room} tokens of a text, max_len, stay exact")
    pages = size(caches) // size(one)
    jax.eval_shape(lambda: [requantize(*pair) for pair in zip(caches, layers, strict=True)])  # raises unless they fit
    return name, layers, pages
