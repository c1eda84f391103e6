"""Places of a decoder's parameters in the tensors of Hugging Face's checkpoints."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, UInt8

from rqjax.core.treefile import Stored, dtype_of
from rqjax.nn.config import DecoderConfig
from rqjax.nn.families import GATE_UP
from rqjax.nn.gguf import Quantized

Tensors = Mapping[str, Stored | Quantized]
"""Tensors of files, by name."""
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
TURNED = {"q_proj", "k_proj", "q_b_proj", "kv_a_proj_with_mqa"}
"""Modules whose outputs turn with the positions."""
BLOCK_BYTES = 2**26
"""Bytes of a tensor that are read at once."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Magnitudes of 3 bits; a fourth bit above them is the sign (Open Compute Project, 2023, MX formats 1.0)."""


class Place(NamedTuple):
    """Place of a parameter: rows of a tensor, rows of a tensor for each expert, or columns of one of all experts."""

    names: tuple[str, ...]
    first: int
    """First row or column of the parameter; others may lie in the same tensor."""
    shape: tuple[int, ...]
    """Shape of each whole tensor."""
    order: np.ndarray | None = None
    """Rows of a head in the file, in the order that the decoder has them in; None: the orders are the same."""
    experts: Literal["apart", "packed", "mxfp4"] | None = None
    """Layout of experts, as in `Family`: packed ones (experts, in, out), their biases (experts, out). MXFP4 has two
    tensors. Blocks (experts, out, in / 32, 16) hold two numbers a byte, the first of them in the low bits. Scales
    (experts, out, in / 32) are exponents of 2 plus 127."""
    step: int = 1
    """Distance of its columns, which alternate with those of other parameters."""

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the parameter needs, by name."""
        if self.experts != "mxfp4":
            return dict.fromkeys(self.names, self.shape)
        experts, inner, outer = self.shape
        scales = (experts, outer, inner // 32)
        return {f"{self.names[0]}_blocks": (*scales, 16), f"{self.names[0]}_scales": scales}

    def part(self, files: Tensors, expert: int, rows: slice, columns: Sequence[slice]) -> np.ndarray:
        """A part of it, or of what an expert has of it; where rows have an order, those of whole heads."""
        if self.experts == "mxfp4":
            each = (files[name].array()[expert, self.first :: self.step][rows] for name in self.tensors)
            return of_mxfp4(*each)[:, *columns]
        if self.experts == "packed":
            return files[self.names[0]].array()[expert].T[self.first :: self.step][rows, *columns]
        own = slice(self.first + rows.start, self.first + rows.stop)
        return self._in_order(files[self.names[expert]].array()[own, *columns], self.order)

    def written(self, x: Array) -> dict[str, Array]:
        """Returns a parameter's part of each tensor of a file, by name."""
        if self.experts == "packed":
            return {self.names[0]: jnp.moveaxis(x, 1, -1)}
        parts = x if self.experts else [self._in_order(x, None if self.order is None else np.argsort(self.order))]
        return dict(zip(self.names, parts, strict=True))

    def joined(self, parts: Sequence[Array]) -> Array:
        """Joins the parts of several parameters, in the order of `first`, to a tensor."""
        if self.experts == "packed":
            return jnp.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
        return jnp.concatenate(parts)

    @staticmethod
    def _in_order(x: Any, order: np.ndarray | None) -> Any:
        return x if order is None else x.reshape(-1, len(order), *x.shape[1:])[:, order].reshape(x.shape)


def of_mxfp4(
    blocks: UInt8[np.ndarray, "*n blocks 16"], scales: UInt8[np.ndarray, "*n blocks"]
) -> BFloat16[np.ndarray, "*n d"]:
    """Decodes MXFP4, as gpt-oss stores it, to bfloat16, which holds its numbers exactly."""
    values = np.concatenate([E2M1, -E2M1])[np.stack([blocks & 15, blocks >> 4], axis=-1)]
    scaled = np.ldexp(values.reshape(*scales.shape, 32), scales[..., None].astype(np.int32) - 127)
    return scaled.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)


Parameters = Mapping[tuple[Any, ...], tuple[int, ...]]
"""Shapes by paths in the decoder."""


def read(place: Place, files: Tensors, shape: tuple[int, ...], index: Any, dtype: DTypeLike | None) -> np.ndarray:
    """Reads an index of a parameter, in a dtype, or in that of the file if it is one to compute in. The array is filled
    piece by piece, and begins where JAX can take it without a copy: on a CPU no tensor is in memory twice."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    sizes = [high - low for low, high in bounds]
    experts, (low, high), *others = bounds if place.experts else [(0, 1), *bounds]
    columns, width = [slice(*bound) for bound in others], math.prod(stop - start for start, stop in others)
    unit = 1 if place.order is None else len(place.order)
    out = _aligned(sizes, dtype or _wide(dtype_of(files[next(iter(place.tensors))].kind)))
    for expert in range(*experts):
        part = out[expert - experts[0]] if place.experts else out
        for rows in _blocks(low, high, width, unit):
            part[rows.start - low : rows.stop - low] = place.part(files, expert, rows, columns)
    return out


def _blocks(low: int, high: int, width: int, unit: int = 1) -> list[slice]:
    """Splits rows into slices that are read at once, of whole units."""
    count = max(BLOCK_BYTES // (4 * width) // unit, 1) * unit
    return [slice(start, min(start + count, high)) for start in range(low, high, count)]


def _wide(dtype: np.dtype) -> DTypeLike:
    """Returns a dtype to compute in; bfloat16 holds all numbers of 8 bits."""
    if dtype.itemsize == 1:
        return jnp.bfloat16
    return dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32


def _aligned(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Makes an array whose first byte has an address that is a multiple of 64."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    whole = np.empty(size + 64, np.uint8)
    first = -whole.ctypes.data % 64
    return whole[first : first + size].view(dtype).reshape(shape)


def places(
    config: DecoderConfig, shapes: Parameters, prefix: str = "model.", head: str = ""
) -> dict[tuple[Any, ...], Place]:
    """Returns the place of each parameter, by its path in the decoder.

    Args:
      config: of the decoder.
      shapes: of the parameters.
      prefix: of the names of all tensors but `lm_head`'s.
      head: prefix of the name of `lm_head`'s tensor.
    """
    family = config.traits

    def place(path: tuple[Any, ...]) -> Place:
        parts, first, shape, order = [str(family.names.get(part, part)) for part in path], 0, shapes[path], None
        before = head if path[0] == "lm_head" else prefix
        if "experts" in path:
            return of_experts(before, parts, shape)
        for i, part in enumerate(path):
            if part in TURNED and family.interleaved:
                order = _interleaved(config, part)
            for whole, members in family.fused.items():
                if part in members:
                    rows = [shapes[(*path[:i], member, *path[i + 1 :])][0] for member in members]
                    parts[i], first = whole, sum(rows[: members.index(part)])
                    shape = (sum(rows), *shape[1:])
        return Place((before + ".".join(parts),), first, shape, order)

    def of_experts(before: str, parts: list[str], shape: tuple[int, ...]) -> Place:
        *parts, module, kind = parts
        if family.experts == "apart":
            names = tuple(f"{before}{'.'.join(parts)}.{i}.{module}.{kind}" for i in range(shape[0]))
            return Place(names, 0, shape[1:], experts="apart")
        whole, members = next(((n, m) for n, m in GATE_UP.items() if module in m), (module, (module,)))
        name = f"{before}{'.'.join(parts)}.{whole}" + ("_bias" if kind == "bias" else "")
        whole_shape = (shape[0], *shape[2:], len(members) * shape[1])
        return Place((name,), members.index(module), whole_shape, experts="packed", step=len(members))

    return {path: place(path) for path in shapes}


def _interleaved(config: DecoderConfig, module: str) -> np.ndarray:
    """Returns the rows of a head in the file, in the decoder's order. Coordinates that turn together lie side by side
    in the file. In the decoder they are half of all that turn apart, and come first. In files of models with latent
    attention those that turn come last."""
    turning = config.ropes[0].turning(config.head_dim)
    pairs = np.arange(turning).reshape(-1, 2).T.reshape(-1)
    if not config.traits.latent:
        return np.concatenate([pairs, np.arange(turning, config.head_dim)])
    others = config.kv_lora_rank if module.startswith("kv") else config.qk_nope_head_dim
    return np.concatenate([others + pairs, np.arange(others)])


def found(config: DecoderConfig, shapes: Parameters, tensors: Tensors, folder: Path) -> dict[tuple[Any, ...], Place]:
    """Returns the places of parameters in the tensors of a folder, if it holds all of them, of the right shapes."""
    prefix, head = _prefix(tensors, EMBEDDINGS, "norm.weight"), _prefix(tensors, HEAD)
    those = places(config, shapes, prefix, head)
    for path, place in those.items():
        if place.experts == "packed" and f"{place.names[0]}_blocks" in tensors:
            those[path] = place._replace(experts="mxfp4")
    tied = f"{prefix}{EMBEDDINGS}", f"{head}{HEAD}"
    if config.tie_word_embeddings and tied[0] not in tensors and tied[1] in tensors:
        those["embed_tokens", "weight"] = those["embed_tokens", "weight"]._replace(names=tied[1:])
    wanted = {name: shape for place in those.values() for name, shape in place.tensors.items()}
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise ValueError(f"{folder} has no tensor {missing[0]!r}" + _more(missing))
    known = {*wanted, *tied}  # many files hold the head beside the embeddings that it is tied to
    others = tuple(f"{prefix}layers.{config.num_hidden_layers + i}." for i in range(config.num_nextn_predict_layers))
    own = [name for name in tensors if name.startswith(prefix) and not name.startswith(others)]
    if extra := sorted(name for name in own if name not in known and not name.endswith("inv_freq")):
        warnings.warn(f"{folder}: tensor {extra[0]!r}{_more(extra)} are not read: no module has them", stacklevel=3)
    for name, expected in wanted.items():
        shape = tensors[name].shape
        if shape != expected:
            raise ValueError(f"{folder}: expected tensor {name!r} of shape {expected}, got {shape}")
    return those


def _prefix(tensors: Iterable[str], *anchors: str) -> str:
    """Returns the prefix of the first anchor that is there; names in parts that take images are longer."""
    for anchor in anchors:
        if found := [name for name in tensors if f".{name}".endswith(f".{anchor}")]:
            return min(found, key=len).removesuffix(anchor)
    return "model." if anchors[0] == EMBEDDINGS else ""


def untied(tensors: Tensors) -> bool:
    """Returns whether files hold embeddings and a head that differ; a config that ties them does not count then."""
    names = f"{_prefix(tensors, EMBEDDINGS)}{EMBEDDINGS}", f"{_prefix(tensors, HEAD)}{HEAD}"
    if not all(name in tensors for name in names):
        return False
    one, other = (tensors[name] for name in names)
    blocks = _blocks(0, one.shape[0], math.prod(one.shape[1:]))
    return one.shape != other.shape or not all(
        np.array_equal(one.array()[rows], other.array()[rows]) for rows in blocks
    )


def joined(weights: Mapping[tuple[Any, ...], Array], config: DecoderConfig) -> dict[str, Array]:
    """Returns the tensors of a file that holds these parameters."""
    parts: dict[str, dict[int, Array]] = {}
    joins = {}
    for path, place in places(config, {path: x.shape for path, x in weights.items()}).items():
        for name, part in place.written(weights[path]).items():
            parts.setdefault(name, {})[place.first] = part
            joins[name] = place.joined
    return {name: joins[name]([rows[first] for first in sorted(rows)]) for name, rows in parts.items()}


def _more(names: Sequence[str]) -> str:
    return f", and {len(names) - 1} others" if len(names) > 1 else ""
