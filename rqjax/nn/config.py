"""What distinguishes the decoders of the supported families, read from Hugging Face's `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rqjax.core import check_int, unknown_name
from rqjax.rotations import Rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3")
"""Values of `model_type`. Of gemma3, which also sees, the text part is read."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "head_dim": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262_208,
        "tie_word_embeddings": True,
    },
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
}
"""What Hugging Face's own classes fill in where a config.json leaves it out."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder; names as in `config.json` where there is one."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Of each layer, how many tokens up to itself a token sees; None: all."""
    ropes: tuple[Rope, ...]
    """Of each layer."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalized, head by head (Qwen3, Gemma 3)."""
    gemma: bool = False
    """Embeddings times sqrt(hidden_size), norms times 1 + w, norms behind attention and MLP too, tanh-GELU for SiLU."""
    query_scale: float | None = None
    """Of the scores; 1 / sqrt(head_dim) if None."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_hidden_layers(self) -> int:
        return len(self.windows)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "DecoderConfig":
        """From the fields of a `config.json`, of transformers 4 or 5.

        Raises:
          UnknownName: an architecture that is not among `FAMILIES`.
          ValueError: a field is missing, wrong or asks for what is not supported; it is named.
        """
        family = fields.get("model_type")
        if family not in FAMILIES:
            raise unknown_name("architecture (model_type of config.json)", str(family), FAMILIES)
        if family == "gemma3":
            family, fields = "gemma3_text", {**_need(fields, "text_config"), "model_type": "gemma3_text"}
        if "quantization_config" in fields:
            raise ValueError("config.json has a quantization_config: quantized weights are not supported")
        fields = {**DEFAULTS.get(family, {}), **fields}
        gemma, biased = family == "gemma3_text", bool(fields.get("attention_bias", False))
        expected = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
        if fields.get(expected[0], expected[1]) != expected[1]:
            raise ValueError(f"expected {expected[0]} {expected[1]!r} in config.json, got {fields[expected[0]]!r}")
        size = {
            name: check_int(name, _need(fields, name), 1, 2**31)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        }
        layers, heads = size.pop("num_hidden_layers"), size["num_attention_heads"]
        kv_heads = check_int("num_key_value_heads", fields.get("num_key_value_heads") or heads, 1, heads)
        if heads % kv_heads:
            raise ValueError(f"expected num_attention_heads to be a multiple of {kv_heads}, got {heads}")
        local = _local(family, fields, layers)
        window = check_int("sliding_window", _need(fields, "sliding_window"), 1, 2**31) if any(local) else None
        return cls(
            **size,
            num_key_value_heads=kv_heads,
            head_dim=check_int("head_dim", fields.get("head_dim") or size["hidden_size"] // heads, 2, 2**16),
            windows=tuple(window if here else None for here in local),
            ropes=tuple(_rope(fields, gemma, here) for here in local),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=biased or family == "qwen2",
            out_bias=biased,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "gemma3_text"),
            gemma=gemma,
            query_scale=fields["query_pre_attn_scalar"] ** -0.5 if gemma else None,
            attention_softcap=fields.get("attn_logit_softcapping"),
            logit_softcap=fields.get("final_logit_softcapping"),
            eos_token_ids=_ids(fields.get("eos_token_id")),
        )


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"config.json has no {name!r}")
    return fields[name]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _local(family: str, fields: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers see a sliding window only."""
    if fields.get("layer_types") is not None:
        kinds = fields["layer_types"]
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown or len(kinds) != layers:
            raise ValueError(f"expected layer_types of {layers} full_attention or sliding_attention, got {kinds}")
        return [kind == "sliding_attention" for kind in kinds]
    if family == "mistral":
        return [fields["sliding_window"] is not None] * layers
    if family == "gemma3_text":
        pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6
        return [(i + 1) % pattern != 0 for i in range(layers)]
    if fields.get("use_sliding_window"):
        return [i >= fields.get("max_window_layers", 28) for i in range(layers)]
    return [False] * layers


def _rope(fields: Mapping[str, Any], gemma: bool, local: bool) -> Rope:
    """The rotary embedding of a layer; transformers 5 has `rope_parameters` for the `rope_theta` and others of 4."""
    parameters, share = fields.get("rope_parameters"), fields.get("partial_rotary_factor", 1.0)
    if parameters is not None:
        if gemma and "full_attention" in parameters:
            parameters = parameters["sliding_attention" if local else "full_attention"]
        share = parameters.get("partial_rotary_factor", share)
        return Rope.parse(parameters.get("rope_theta", 1e4), parameters, share)
    if gemma and local:
        return Rope(float(fields["rope_local_base_freq"]))
    return Rope.parse(fields.get("rope_theta", 1e4), fields.get("rope_scaling"), share)
