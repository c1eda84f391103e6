"""Configurations of decoders of the supported families, read from Hugging Face's `config.json`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from rqjax.core import UnknownName, check_positive, unknown_name
from rqjax.nn import positions
from rqjax.nn.families import ACTIVATIONS, FAMILIES, MISSING, Family
from rqjax.nn.fields import need, need_object, read, token_ids, whole
from rqjax.rotations import Rope
from rqjax.rotations.rope import yarn_length


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a decoder; fields are named as in `config.json` where it has them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Tokens up to itself that a token sees, for each layer; None: all."""
    ropes: tuple[Rope, ...]
    """Rotary embedding of each layer."""
    activation: str = "silu"
    """A name of `families.ACTIVATIONS`."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Inner size of an expert."""
    mixtures: tuple[bool, ...] = ()
    """True for each layer that has experts in the place of an MLP; no layer has, if empty."""
    norm_topk_prob: bool = False
    """True if the weights of a token's experts add up to 1."""
    n_shared_experts: int = 0
    """Shared experts: all tokens go through one MLP, which is as large as these together."""
    routed_scaling_factor: float = 1.0
    """Factor of the other experts' outputs."""
    groups: tuple[int, int] = (1, 1)
    """Groups of experts, and the number of groups, the best ones, that a token's experts are chosen from."""
    num_nextn_predict_layers: int = 0
    """Layers behind the others in a checkpoint that predict more tokens; they are not read."""
    q_lora_rank: int = 0
    """Rank of the query projection in latent attention; 0 if queries are projected from the hidden state directly."""
    kv_lora_rank: int = 0
    """Rank of the latent, the last coordinates of a `head_dim`; 0 if attention is not latent."""
    qk_nope_head_dim: int = 0
    """Coordinates of a head's queries and keys that do not turn, beside those of a `head_dim` that do."""
    v_head_dim: int = 0
    swiglu: tuple[float, float] | None = None
    """Alpha and limit of experts that compute (up + 1) gate sigmoid(alpha gate), clamped; None: up silu(gate)."""
    family: str = "llama"
    """A name of `FAMILIES`."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add."""
    query_scale: float | None = None
    """Factor of the scores; 1 / sqrt(head_dim) if None."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.windows)

    @property
    def cached(self) -> int:
        """Numbers that the caches of all layers keep for a token."""
        sides = 1 if self.kv_lora_rank else 2
        return sides * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @classmethod
    def parse(cls, fields: Mapping[str, Any], context: int | None = None) -> "DecoderConfig":
        """Parses the fields of a `config.json` of transformers 4 or 5.

        It is for texts of up to `context` tokens, as in `load_decoder`.

        Raises:
          UnknownName: an architecture that is not among `FAMILIES`; the nearest one is named, and what is missing.
          ValueError: a field is missing, wrong or asks for what is not supported; it is named.
        """
        name = fields.get("model_type")
        if name in MISSING:
            nearest, missing = MISSING[name]
            raise UnknownName(f"unsupported architecture {name!r}: the nearest one is {nearest!r}; missing: {missing}")
        family = FAMILIES[str(name)]
        if name == "gemma3":
            name, fields = "gemma3_text", _of_text(fields)
        _check_supported(family, fields)
        fields = read(str(name), fields)
        if family.latent:
            fields |= _latent(family, fields)
        fields |= {name: whole(fields, name) for name in NEEDED}
        size, heads, layers = fields["hidden_size"], fields["num_attention_heads"], fields["num_hidden_layers"]
        kv_heads = whole(fields, "num_key_value_heads", 1, heads, default=heads)
        if heads % kv_heads:
            raise ValueError(f"expected num_attention_heads to be a multiple of {kv_heads}, got {heads}")
        turning = positions.turning(fields, layers)
        local = _local(family, fields, turning)
        window = whole(fields, "sliding_window") if any(local) else None
        biased = fields.get("attention_bias", False)
        root = size**0.5 if family.root_scale else 1.0
        found = {
            **fields,
            **_experts(family, fields, layers),
            "num_key_value_heads": kv_heads,
            "head_dim": whole(fields, "head_dim", 2, 2**16, default=size // heads),
            "windows": tuple(window if here else None for here in local),
            "ropes": tuple(map(functools.partial(positions.rope, family, fields, context), local, turning)),
            "activation": _activation(fields),
            "qkv_bias": biased or family.qkv_bias,
            "out_bias": biased and family.out_bias,
            "num_nextn_predict_layers": whole(fields, "num_nextn_predict_layers", 0, 2**10, default=0),
            "family": name,
            "embedding_scale": root * fields.get("embedding_multiplier", 1.0),
            "residual_scale": fields.get("residual_multiplier", 1.0),
            "query_scale": _query_scale(fields),
            "attention_softcap": _cap(fields, "attn_logit_softcapping"),
            "logit_softcap": _cap(fields, "final_logit_softcapping"),
            "logit_scale": 1 / fields.get("logits_scaling", 1.0),
            "eos_token_ids": token_ids(fields["eos_token_id"]),
        }
        return cls(**{field.name: found[field.name] for field in dataclasses.fields(cls) if field.name in found})


NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
"""Whole numbers that all families need."""
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
"""Fields that only a decoder with latent attention has."""


def _of_text(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of Gemma 3's text part. Some stand beside it; its class has no soft limit of logits."""
    need(fields, "text_config")
    text = {**need_object(fields, "text_config"), "final_logit_softcapping": None}
    text["tie_word_embeddings"] = fields.get("tie_word_embeddings", True)
    return text | {n: fields[n] for n in ("eos_token_id", "quantization_config") if fields.get(n) is not None}


def _check_supported(family: Family, fields: Mapping[str, Any]) -> None:
    """Refuses what would change the numbers of any family, or would be attention to later tokens."""
    method, is_read = need_object(fields, "quantization_config").get("quant_method"), family.experts == "packed"
    if fields.get("quantization_config") is not None and not (method == "mxfp4" and is_read):
        raise ValueError("config.json has a quantization_config: quantized weights are not supported, but gpt_oss's")
    if not fields.get("is_causal", True) or (family.unit_offset and fields.get("use_bidirectional_attention")):
        raise ValueError("expected causal attention, got is_causal false or use_bidirectional_attention in config.json")
    if fields.get("per_layer_config") is not None:
        raise ValueError("expected layers of one size, got a per_layer_config in config.json")


def _activation(fields: Mapping[str, Any]) -> str:
    name = fields.get("hidden_activation", fields.get("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise unknown_name("activation (hidden_act of config.json)", name, ACTIVATIONS)
    return name


def _cap(fields: Mapping[str, Any], name: str) -> float | None:
    return None if fields.get(name) is None else check_positive(name, fields[name])


def _query_scale(fields: Mapping[str, Any]) -> float | None:
    if "query_pre_attn_scalar" in fields:
        return check_positive("query_pre_attn_scalar", fields["query_pre_attn_scalar"]) ** -0.5
    return fields.get("attention_multiplier")


def _experts(family: Family, fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns the fields of mixtures of experts."""
    if family.experts is None:
        return {}
    name = "num_local_experts" if "num_local_experts" in fields else "n_routed_experts"
    count = whole(fields, name, 1, 2**20)
    step = whole(fields, "decoder_sparse_step", 1, 2**20, default=1)
    first = whole(fields, "first_k_dense_replace", 0, 2**20, default=0)
    dense = fields.get("mlp_only_layers") or ()
    method = fields.get("topk_method")
    if method not in (None, "greedy", "group_limited_greedy"):
        raise ValueError(f"expected topk_method greedy or group_limited_greedy in config.json, got {method!r}")
    grouped = "n_group" in fields and method != "greedy"
    groups, of_one = whole(fields, "n_group", 1, count) if grouped else 1, 2 if family.router == "sigmoid" else 1
    if count % groups or count < of_one * groups:
        raise ValueError(f"expected a multiple of n_group {groups} experts, {of_one} or more a group, got {count}")
    best = whole(fields, "topk_group", 1, groups) if grouped else 1
    limits = [fields[name] for name in ("swiglu_alpha", "swiglu_limit") if name in fields]
    return {
        "num_experts": count,
        "num_experts_per_tok": whole(fields, "num_experts_per_tok", 1, best * count // groups),
        "moe_intermediate_size": whole(fields, "moe_intermediate_size", default=fields["intermediate_size"]),
        "mixtures": tuple(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "n_shared_experts": whole(fields, "n_shared_experts", 0, 2**20, default=0),
        "groups": (groups, best),
        "norm_topk_prob": family.normalized or bool(fields.get("norm_topk_prob")),
        "swiglu": tuple(limits) or None,
    }


def _latent(family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of latent attention as if queries shared one head: coordinates that turn, then the latent."""
    size = {name: whole(fields, name, 1, 2**16) for name in (*LATENT[1:], "qk_rope_head_dim")}
    turning = size.pop("qk_rope_head_dim")
    if not fields.get("rope_interleave", True):
        raise ValueError(f"expected rope_interleave true in config.json, got {fields['rope_interleave']!r}")
    rope = positions.rope_parameters(family, fields, False)
    of_all = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    longer = 1.0
    if of_all:
        longer = yarn_length(check_positive("factor", need(rope, "factor")), check_positive("mscale_all_dim", of_all))
    dim = turning + size["kv_lora_rank"]
    return size | {
        "q_lora_rank": whole(fields, "q_lora_rank", 0, 2**16, default=0),
        "num_key_value_heads": 1,
        "head_dim": dim,
        "turning_share": turning / dim,
        "attention_multiplier": (size["qk_nope_head_dim"] + turning) ** -0.5 * longer**2,
    }


def _local(family: Family, fields: Mapping[str, Any], turning: Sequence[bool]) -> list[bool]:
    """Returns which layers see a sliding window only."""
    layers, kinds = len(turning), fields.get("layer_types")
    windowed = fields.get("sliding_window") is not None and fields.get("use_sliding_window", True)
    if kinds is not None:
        if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise ValueError(f"expected layer_types of {layers} full_attention or sliding_attention, got {kinds}")
        local = [kind == "sliding_attention" for kind in kinds]
        if any(local) and family.windows == "upper" and not windowed:
            raise ValueError("expected use_sliding_window and a sliding_window for layer_types with sliding_attention")
        return local
    if isinstance(family.windows, int):
        pattern = whole(fields, "sliding_window_pattern", 1, 2**20, default=family.windows)
        return [(i + 1) % pattern != 0 for i in range(layers)]
    if family.windows == "upper":
        first = whole(fields, "max_window_layers", 0, 2**20)
        return [windowed and i >= first for i in range(layers)]
    return [windowed and (family.windows == "all" or not turns) for turns in turning]
