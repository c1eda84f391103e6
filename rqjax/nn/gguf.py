"""GGUF files, as llama.cpp has them: a decoder's `config.json` and the tensors of Hugging Face's names."""

import dataclasses
import functools
import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from rqjax.core import Registry, check_int, extras

NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Dtypes of metadata by the format's number of a type; 8 is a text, 9 an array."""
KV_HEADS = "attention.head_count_kv"
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    KV_HEADS: "num_key_value_heads",
}
"""Whole numbers that each file has, behind the name of its architecture, and their fields of `config.json`."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a file, and the names that Hugging Face's checkpoints have for them."""


class Architecture(NamedTuple):
    """Traits of one family in GGUF files."""

    model_type: str
    names: Mapping[str, str] = {}
    """Names of modules where they are not those of `NAMES`."""
    interleaved: bool = False
    """True if rows 2i and 2i + 1 of a head of queries or keys turn together; Hugging Face has them half a head
    apart."""
    unit_offset: bool = False
    """True if norms have the 1 added that Hugging Face's classes add."""


GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES: Registry = Registry(
    "architecture (general.architecture of a GGUF file)",
    {
        "llama": Architecture("llama", interleaved=True),
        "qwen2": Architecture("qwen2"),
        "qwen3": Architecture("qwen3"),
        "gemma3": Architecture("gemma3_text", GEMMA, unit_offset=True),
        "phi3": Architecture("phi3", {"ffn_up": "mlp.gate_up_proj"}),
    },
)
"""Supported architectures. "llama" is that of Mistral and SmolLM, too."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn of a chat. Older files name only the one that ends a text."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor in a GGUF file, as `rqjax.core.treefile.Stored`. Each piece is dequantized when it is asked for."""

    path: Path
    coding: Any
    """The file's type of the tensor, a `gguf.GGMLQuantizationType`."""
    shape: tuple[int, ...]
    start: int
    kind: str = "F32"
    """Dtype that the tensor is read in if none is given, as safetensors name it."""
    order: np.ndarray | None = None
    """Rows of the file in the order that they are returned in; None: as they lie."""
    added: float = 0.0
    """Number that the file's numbers have added."""

    def array(self) -> "Quantized":
        return self

    def __getitem__(self, index: Any) -> Float32[np.ndarray, "*n"]:
        """Dequantizes a slice of rows, and takes one of columns if it is given. The file is mapped anew each time."""
        import gguf

        rows, *columns = index if isinstance(index, tuple) else (index,)
        block, size = gguf.GGML_QUANT_SIZES[self.coding]
        *count, width = self.shape
        data = np.memmap(self.path, np.uint8, "r", self.start, (*count, width // block * size))
        if not count:
            x = gguf.dequantize(data, self.coding)
            x = (x if self.order is None else x[self.order])[rows]
        else:
            taken = data[rows] if self.order is None else data[self.order[rows]]
            x = gguf.dequantize(np.ascontiguousarray(taken), self.coding)[:, *columns]
        return x - np.float32(self.added) if self.added else x


class Header(NamedTuple):
    """Metadata and tensors of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Quantized]

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[str(self.metadata.get("general.architecture"))]

    def of(self, name: str, default: Any = None) -> Any:
        """Returns what the architecture's metadata have of this name.

        Raises:
          ValueError: they have nothing, and there is no default.
        """
        name = f"{self.metadata['general.architecture']}.{name}"
        if self.metadata.get(name, default) is None:
            raise ValueError(f"{self.path} has no {name!r}")
        return self.metadata.get(name, default)

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of the architecture's metadata."""
        if name == KV_HEADS and default is None:  # left out where no heads share keys and values
            default = self.count("attention.head_count")
        return check_int(f"{name} of {self.path}", self.of(name, default), 1, 2**31)


def read(path: Path) -> Header:
    """Reads the header of a file, and those of its other parts.

    Raises:
      FileNotFoundError: a part is missing.
      ValueError: a file is no GGUF file, or not whole, or not the first part, or cannot be dequantized.
    """
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read(path: Path, size: int, changed: int) -> Header:
    """Reads a file once, for its fields, tensors and tokenizer, as long as it does not change."""
    header = _parsed(path)
    parts = check_int(f"split.count of {path}", header.metadata.get("split.count", 1), 0, 2**16)
    if parts > 1:
        place = re.fullmatch(r"(.*)-00001-of-(\d{5})", path.stem)
        if place is None or int(place[2]) != parts:
            raise ValueError(f"{path} is one of {parts} parts: expected the first, NAME-00001-of-{parts:05}.gguf")
        for i in range(2, parts + 1):
            other = path.with_name(f"{place[1]}-{i:05}-of-{place[2]}{path.suffix}")
            if not other.exists():
                raise FileNotFoundError(f"there is no {other.name} in {path.parent}, a part of {path.name}")
            header.tensors.update(_parsed(other).tensors)
    return header


def _parsed(path: Path) -> Header:
    """Parses a file's own header."""
    with extras.explained():
        import gguf
    try:
        header = _header(path)
    except (ValueError, EOFError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from None
    for name, tensor in header.tensors.items():
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.coding][1]), np.uint8), tensor.coding)
        except NotImplementedError:
            raise ValueError(f"{path}: tensor {name!r} of type {tensor.coding.name} cannot be dequantized") from None
    return header


def _header(path: Path) -> Header:
    """Parses a header. `gguf.GGUFReader` takes 40 times as long, and does not end if a count is damaged."""
    import gguf

    data = np.memmap(path, np.uint8, "r").data
    place = 0

    def bytes_of(count: int) -> memoryview:
        nonlocal place
        place += count
        if place > len(data):
            raise EOFError("it ends too early")
        return data[place - count : place]

    def number(form: str) -> int:
        return struct.unpack(form, bytes_of(struct.calcsize(form)))[0]

    def text() -> str:
        return str(bytes_of(number("<Q")), "utf-8")

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            kind, count = number("<I"), number("<Q")
            if kind in NUMBERS:
                dtype = np.dtype(NUMBERS[kind])
                return np.frombuffer(bytes_of(count * dtype.itemsize), dtype).tolist()
            return [value(kind) for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"its metadata have a type {kind}")
        return value_of(NUMBERS[kind])

    def value_of(dtype: str) -> Any:
        found = np.frombuffer(bytes_of(np.dtype(dtype).itemsize), dtype)[0]
        return float(str(found)) if dtype == "<f4" else found.item()  # 1e-6 is no number of 32 bits

    if bytes(bytes_of(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if (version := number("<I")) not in (2, 3):
        raise ValueError(f"expected version 2 or 3 of the format, got {version}")
    tensors, fields = number("<Q"), number("<Q")
    metadata = {text(): value(number("<I")) for _ in range(fields)}
    found = []
    for _ in range(tensors):
        name, axes = text(), number("<I")
        shape = tuple(number("<Q") for _ in range(axes))[::-1]
        found.append((name, shape, gguf.GGMLQuantizationType(number("<I")), number("<Q")))
    unit = check_int("general.alignment", metadata.get("general.alignment", 32), 1, 2**31)
    place += -place % unit
    for name, shape, coding, start in found:
        block, size = gguf.GGML_QUANT_SIZES[coding]
        if not shape or shape[-1] % block or place + start + math.prod(shape) // block * size > len(data):
            raise ValueError(f"tensor {name!r} of shape {shape} does not fit into it")
    return Header(path, metadata, {name: Quantized(path, code, shape, place + at) for name, shape, code, at in found})


def fields(path: Path) -> dict[str, Any]:
    """Returns the fields of the `config.json` that a file stands for.

    Raises:
      UnknownName: an architecture that is not supported.
      ValueError: the file is damaged, or asks for what is not supported; it is named.
    """
    header = read(path)
    kind = header.architecture.model_type
    if header.of("expert_count", 0):
        raise ValueError(f"{path} has a mixture of experts: not supported in GGUF files")
    stored = tensors(path)
    if "model.embed_tokens.weight" not in stored:
        raise ValueError(f"{path} has no tensor 'token_embd.weight'")
    found: dict[str, Any] = {field: header.count(name) for name, field in FIELDS.items()}
    if found["num_hidden_layers"] > len(stored):
        raise ValueError(f"{path} has {len(stored)} tensors, too few for {found['num_hidden_layers']} layers")
    dim = header.count("attention.key_length", found["hidden_size"] // found["num_attention_heads"])
    if header.of("attention.value_length", dim) != dim:
        raise ValueError(f"{path}: expected keys and values of one length, got {dim} and another")
    turning, window = header.count("rope.dimension_count", dim), header.of("attention.sliding_window", 0)
    if turning != dim and kind != "phi3":
        raise ValueError(f"{path}: expected a rope that turns all {dim} coordinates of a head, got {turning}")
    found |= {
        "model_type": "mistral" if kind == "llama" and window else kind,
        "vocab_size": stored["model.embed_tokens.weight"].shape[0],
        "head_dim": dim,
        "partial_rotary_factor": turning / dim,
        "rms_norm_eps": header.of("attention.layer_norm_rms_epsilon"),
        "rope_theta": header.of("rope.freq_base", 1e4),
        **_scaling(path, header),
        "sliding_window": window or None,
        "tie_word_embeddings": "lm_head.weight" not in stored,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in stored,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in stored,
        "eos_token_id": _ends(header.metadata),
    }
    if kind == "gemma3_text":
        found |= _of_gemma(header, found)
    return found


def _of_gemma(header: Header, found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields that only Gemma 3 has. Its largest model, of 62 layers, alone has another scale of queries."""
    layers, pattern = found["num_hidden_layers"], header.of("attention.sliding_window_pattern", 6)
    if isinstance(pattern, int):
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    by_head = found["hidden_size"] // found["num_attention_heads"]
    return {
        "query_pre_attn_scalar": by_head if layers == 62 else found["head_dim"],
        "rope_local_base_freq": header.of("rope.freq_base_swa", 1e4),
        "layer_types": ["sliding_attention" if local else "full_attention" for local in pattern],
        "final_logit_softcapping": header.of("final_logit_softcapping", 0) or None,
    }


def _scaling(path: Path, header: Header) -> dict[str, Any]:
    """Returns the `rope_scaling` of a file, and the length that it stretches, which some families have beside it.

    Llama 3's scaling lies there as a divisor of each frequency, and not as the four numbers that it was made of. It
    becomes a `longrope` whose short and long divisors are the same.
    """
    kind, factor = header.of("rope.scaling.type", "linear"), header.of("rope.scaling.factor", 0) or 1.0
    longer, usual = header.of("rope.scaling.attn_factor", 1.0), header.count("context_length")
    length = {"original_max_position_embeddings": header.count("rope.scaling.original_context_length", usual)}
    both = _divisors(header, "rope_freqs")
    short, long = (_divisors(header, f"rope_factors_{texts}") or both for texts in ("short", "long"))
    if short and long and (kind in ("longrope", "none") or factor == 1):
        scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "factor": factor, **length}
        return {"rope_scaling": {**scaling, "attention_factor": longer}, **length}
    if not short and longer == 1:
        if kind == "none" or (kind == "linear" and factor == 1):
            return {"rope_scaling": None}
        if kind == "linear":
            return {"rope_scaling": {"rope_type": kind, "factor": factor}}
        if kind == "yarn":
            betas = {name: header.of(f"rope.scaling.yarn_{name}", 0) or None for name in ("beta_fast", "beta_slow")}
            return {"rope_scaling": {"rope_type": kind, "factor": factor, **length, **betas}, **length}
    raise ValueError(f"{path} asks for a scaling of rotary positions that is not supported: {kind!r} by {factor}")


def _divisors(header: Header, name: str) -> list[float] | None:
    """Returns a divisor for each frequency, if the file has them."""
    stored = header.tensors.get(f"{name}.weight")
    return None if stored is None else stored[:].tolist()


def tensors(path: Path) -> dict[str, Quantized]:
    """Returns the tensors of a file by Hugging Face's names.

    Raises:
      ValueError: a tensor has a name that the architecture has not, or a type that cannot be dequantized.
    """
    header = read(path)
    architecture = header.architecture
    names = NAMES | dict(architecture.names)
    codings = {tensor.coding.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    kind = codings.pop() if codings in ({"F16"}, {"BF16"}) else "F32"
    found = {}
    for name, tensor in header.tensors.items():
        if name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
            continue
        place = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if place is None or place[2] not in names:
            raise ValueError(f"{path}: tensor {name!r} has no place in a decoder of its architecture")
        module = f"model.layers.{place[1]}.{names[place[2]]}" if place[1] else names[place[2]]
        heads = {"attn_q": "attention.head_count", "attn_k": KV_HEADS}.get(place[2])
        order, added = None, float(architecture.unit_offset and module.endswith("norm"))
        if architecture.interleaved and heads:
            if tensor.shape[0] % (2 * header.count(heads)):
                raise ValueError(f"{path}: expected tensor {name!r} of {header.count(heads)} heads, got {tensor.shape}")
            order = np.arange(tensor.shape[0]).reshape(header.count(heads), -1, 2).swapaxes(1, 2).reshape(-1)
        found[f"{module}.{place[3]}"] = dataclasses.replace(tensor, kind=kind, order=order, added=added)
    return found


def _ends(metadata: Mapping[str, Any]) -> list[int]:
    """Returns the ids of tokens that end a text or a turn."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    return list(
        dict.fromkeys([id for id in named if id is not None] + [tokens.index(t) for t in TURN_ENDS if t in tokens])
    )
