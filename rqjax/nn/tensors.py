"""Where a decoder's parameters lie in the tensors of Hugging Face's checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from rqjax.nn.config import DecoderConfig

PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""Of the decoder's tensors; those of models that also see come last."""
OTHERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Prefixes of tensors that are no part of the decoder."""
TURNED = {"q_proj", "k_proj"}
"""Modules whose rows turn by positions."""


class Place(NamedTuple):
    """Where a parameter lies: rows of a tensor."""

    name: str
    first: int
    shape: tuple[int, ...]
    """Of the whole tensor."""
    order: np.ndarray | None
    """Rows of a head in the file, in the order in which the decoder has them; None: they are the same."""

    def read(self, tensor: Any, count: int, index: Any = slice(None)) -> Array:
        """What is at an index of a parameter of `count` rows; of heads whose rows have an order, of whole heads."""
        rows, *others = index if isinstance(index, tuple) else (index,)
        low, high, _ = rows.indices(count)
        return self._in_order(tensor[(slice(self.first + low, self.first + high), *others)], self.order)

    def written(self, x: Shaped[Array, "rows ..."]) -> Shaped[Array, "rows ..."]:
        """A parameter as it is in the file."""
        return self._in_order(x, None if self.order is None else np.argsort(self.order))

    @staticmethod
    def _in_order(x: Array, order: np.ndarray | None) -> Array:
        return x if order is None else x.reshape(-1, len(order), *x.shape[1:])[:, order].reshape(x.shape)


def places(
    config: DecoderConfig,
    shapes: Mapping[tuple[Any, ...], tuple[int, ...]],
    prefix: str = PREFIXES[0],
    head: str = "",
) -> dict[tuple[Any, ...], Place]:
    """The place of each parameter, by its path in the decoder.

    Args:
      config: of the decoder.
      shapes: of the parameters.
      prefix: of tensors, but that of `lm_head`.
      head: its prefix.
    """
    family = config.traits

    def place(path: tuple[Any, ...]) -> Place:
        parts, first, shape, order = list(path), 0, shapes[path], None
        for i, part in enumerate(path):
            parts[i] = family.names.get(part, part)
            if part in TURNED and family.interleaved:
                order = _interleaved(config)
            for whole, members in family.fused.items():
                if part in members:
                    rows = [shapes[(*path[:i], member, *path[i + 1 :])][0] for member in members]
                    parts[i], first = whole, sum(rows[: members.index(part)])
                    shape = (sum(rows), *shape[1:])
        return Place((head if path[0] == "lm_head" else prefix) + ".".join(map(str, parts)), first, shape, order)

    return {path: place(path) for path in shapes}


def _interleaved(config: DecoderConfig) -> np.ndarray:
    """Coordinates that turn together lie side by side in the file, and half of all that turn apart in the decoder."""
    turning = config.ropes[0].turning(config.head_dim)
    pairs = np.arange(turning).reshape(-1, 2).T.reshape(-1)
    return np.concatenate([pairs, np.arange(turning, config.head_dim)])


def found(
    config: DecoderConfig, shapes: Mapping[tuple[Any, ...], tuple[int, ...]], tensors: Mapping[str, Any], folder: Path
) -> dict[tuple[Any, ...], Place]:
    """The places of parameters in the tensors of a folder, if it holds all of them, of the right shapes, and no
    others."""
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), PREFIXES[0])
    head = prefix.removesuffix("model.") if prefix == PREFIXES[1] else ""
    those = places(config, shapes, prefix, head)
    names = [place.name for place in those.values()]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"{folder} has no tensor {missing[0]!r}" + _more(missing))
    known = {*names, f"{head}lm_head.weight"}  # which many files hold beside the embeddings it is tied to
    extra = [n for n in tensors if n not in known and not n.startswith(OTHERS) and not n.endswith("inv_freq")]
    if extra:
        raise ValueError(
            f"{folder} has a tensor {sorted(extra)[0]!r} that its config.json has no use for" + _more(extra)
        )
    for place in those.values():
        shape = tuple(tensors[place.name].get_slice(place.name).get_shape())
        if shape != place.shape:
            raise ValueError(f"{folder}: expected tensor {place.name!r} of shape {place.shape}, got {shape}")
    return those


def joined(weights: Mapping[tuple[Any, ...], Array], config: DecoderConfig) -> dict[str, Array]:
    """The tensors of a file that holds parameters."""
    parts: dict[str, dict[int, Array]] = {}
    for path, place in places(config, {path: x.shape for path, x in weights.items()}).items():
        parts.setdefault(place.name, {})[place.first] = place.written(weights[path])
    return {name: jnp.concatenate([rows[first] for first in sorted(rows)]) for name, rows in parts.items()}


def _more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} others" if len(names) > 1 else ""
