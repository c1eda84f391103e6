"""What distinguishes the decoders of the supported families, read from Hugging Face's `config.json`."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from rqjax.core import UnknownName, check_int, unknown_name
from rqjax.nn.families import FAMILIES, MISSING, Family
from rqjax.rotations import Rope
from rqjax.rotations.rope import yarn_length


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
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Of an expert."""
    mixtures: tuple[bool, ...] = ()
    """Of each layer, whether it has experts in the place of an MLP; none, if empty."""
    norm_topk_prob: bool = False
    """Whether the weights of a token's experts add up to 1."""
    n_shared_experts: int = 0
    """Whose sizes add up to that of an MLP which all tokens go through."""
    routed_scaling_factor: float = 1.0
    """Of what the other experts make."""
    groups: tuple[int, int] = (1, 1)
    """Of experts, and of how many of these groups, the best ones, a token's experts are."""
    num_nextn_predict_layers: int = 0
    """Behind the others in a checkpoint, to guess more tokens with; they are not read."""
    q_lora_rank: int = 0
    """Of latent attention, of what queries are made of; 0: of all that goes into a layer."""
    kv_lora_rank: int = 0
    """Of the latent, the last coordinates of a `head_dim`; 0: attention of another kind."""
    qk_nope_head_dim: int = 0
    """Coordinates of a head's queries and keys that do not turn, beside those of a `head_dim` that do."""
    v_head_dim: int = 0
    swiglu: tuple[float, float] | None = None
    """Alpha and limit of experts that make (up + 1) gate sigmoid(alpha gate), clamped, and not up silu(gate)."""
    family: str = "llama"
    """A name of `FAMILIES`."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what attention and MLP add."""
    query_scale: float | None = None
    """Of the scores; 1 / sqrt(head_dim) if None."""
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
        """Numbers of a token that the caches of all layers keep."""
        sides = 1 if self.kv_lora_rank else 2
        return sides * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    @classmethod
    def parse(cls, fields: Mapping[str, Any], context: int | None = None) -> "DecoderConfig":
        """From the fields of a `config.json`, of transformers 4 or 5, for texts of up to `context` tokens, as in
        `load_decoder`.

        Raises:
          UnknownName: an architecture that is not among `FAMILIES`; the nearest one is named, and what is missing.
          ValueError: a field is missing, wrong or asks for what is not supported; it is named.
        """
        name = fields.get("model_type")
        if name in MISSING:
            nearest, missing = MISSING[name]
            raise UnknownName(f"unsupported architecture {name!r}: the nearest one is {nearest!r}; missing: {missing}")
        if name not in FAMILIES:
            raise unknown_name("architecture (model_type of config.json)", str(name), FAMILIES)
        if name == "gemma3":  # which also sees
            name, fields = "gemma3_text", _need(fields, "text_config")
        family = FAMILIES[name]
        method = (fields.get("quantization_config") or {}).get("quant_method")
        if "quantization_config" in fields and (method != "mxfp4" or family.experts != "packed"):
            raise ValueError(
                "config.json has a quantization_config: quantized weights are not supported, but gpt_oss's"
            )
        fields = {**family.defaults, **fields}
        latent = _latent(fields) if family.latent else {}
        fields |= latent
        field, activation = family.activation
        if fields.get(field, activation) != activation:
            raise ValueError(f"expected {field} {activation!r} in config.json, got {fields[field]!r}")
        biased = bool(fields.get("attention_bias", False))
        size = {
            name: check_int(name, _need(fields, name), 1, 2**31)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
        }
        layers, heads = size.pop("num_hidden_layers"), size["num_attention_heads"]
        kv_heads = check_int("num_key_value_heads", fields.get("num_key_value_heads") or heads, 1, heads)
        if heads % kv_heads:
            raise ValueError(f"expected num_attention_heads to be a multiple of {kv_heads}, got {heads}")
        local = _local(family, fields, layers)
        root = size["hidden_size"] ** 0.5 if family.root_scale else 1.0
        window = check_int("sliding_window", _need(fields, "sliding_window"), 1, 2**31) if any(local) else None
        return cls(
            **size,
            num_key_value_heads=kv_heads,
            head_dim=check_int("head_dim", fields.get("head_dim") or size["hidden_size"] // heads, 2, 2**16),
            windows=tuple(window if here else None for here in local),
            ropes=tuple(map(functools.partial(_rope, fields, context), local, _turning(fields, layers))),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            qkv_bias=biased or family.qkv_bias,
            out_bias=biased and family.out_bias,
            mlp_bias=bool(fields.get("mlp_bias", False)),
            **{name: latent[name] for name in LATENT if name in latent},
            num_nextn_predict_layers=check_int(
                "num_nextn_predict_layers", fields.get("num_nextn_predict_layers") or 0, 0, 2**10
            ),
            **_experts(family, fields, layers),
            family=name,
            embedding_scale=root * _scale(fields, "embedding_multiplier"),
            residual_scale=_scale(fields, "residual_multiplier"),
            query_scale=_query_scale(fields),
            attention_softcap=fields.get("attn_logit_softcapping"),
            logit_softcap=fields.get("final_logit_softcapping"),
            logit_scale=1 / _scale(fields, "logits_scaling"),
            eos_token_ids=_ids(fields.get("eos_token_id")),
        )


LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
"""Fields that a decoder with latent attention has alone."""


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"config.json has no {name!r}")
    return fields[name]


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _scale(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name, 1.0)
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"expected a positive {name} in config.json, got {value!r}")
    return float(value)


def _query_scale(fields: Mapping[str, Any]) -> float | None:
    if "query_pre_attn_scalar" in fields:
        return _scale(fields, "query_pre_attn_scalar") ** -0.5
    return _scale(fields, "attention_multiplier") if "attention_multiplier" in fields else None


def _experts(family: Family, fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Fields of mixtures, with the names of transformers 4 or 5."""
    if family.experts is None:
        return {}
    count = fields.get("num_experts") or fields.get("n_routed_experts") or _need(fields, "num_local_experts")
    count = check_int("num_experts", count, 1, 2**20)
    size = fields.get("moe_intermediate_size") or _need(fields, "intermediate_size")
    step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    limit, first = fields.get("swiglu_limit"), fields.get("first_k_dense_replace", 0)
    groups = check_int("n_group", fields.get("n_group") or 1, 1, count)
    if fields.get("topk_method") == "greedy":
        groups = 1
    if count % groups:
        raise ValueError(f"expected a multiple of n_group {groups} experts, got {count}")
    return {
        "num_experts": count,
        "num_experts_per_tok": check_int("num_experts_per_tok", _need(fields, "num_experts_per_tok"), 1, count),
        "moe_intermediate_size": check_int("moe_intermediate_size", size, 1, 2**31),
        "mixtures": tuple(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers)),
        "n_shared_experts": check_int("n_shared_experts", fields.get("n_shared_experts") or 0, 0, 2**20),
        "routed_scaling_factor": _scale(fields, "routed_scaling_factor"),
        "groups": (groups, check_int("topk_group", fields.get("topk_group") or 1, 1, groups) if groups > 1 else 1),
        "norm_topk_prob": bool(fields.get("norm_topk_prob", False)),
        "swiglu": None if limit is None else (float(fields["swiglu_alpha"]), float(limit)),
    }


def _latent(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of multi-head latent attention, as if all queries shared one head of keys: those that turn, then the latent."""
    size = {name: check_int(name, _need(fields, name), 1, 2**16) for name in (*LATENT[1:], "qk_rope_head_dim")}
    turning = size.pop("qk_rope_head_dim")
    if not fields.get("rope_interleave", True):
        raise ValueError("expected rope_interleave True in config.json")
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    longer = yarn_length(scaling["factor"], scaling["mscale_all_dim"]) if scaling.get("mscale_all_dim") else 1
    dim = turning + size["kv_lora_rank"]
    return size | {
        "q_lora_rank": check_int("q_lora_rank", fields["q_lora_rank"] or 0, 0, 2**16),
        "num_key_value_heads": 1,
        "head_dim": dim,
        "partial_rotary_factor": turning / dim,
        "attention_multiplier": (size["qk_nope_head_dim"] + turning) ** -0.5 * longer**2,
    }


def _local(family: Family, fields: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers see a sliding window only."""
    if fields.get("layer_types") is not None:
        kinds = fields["layer_types"]
        unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
        if unknown or len(kinds) != layers:
            raise ValueError(f"expected layer_types of {layers} full_attention or sliding_attention, got {kinds}")
        return [kind == "sliding_attention" for kind in kinds]
    if family.windows == "all":
        return [fields.get("sliding_window") is not None] * layers
    if family.windows is not None:
        pattern = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or family.windows
        return [(i + 1) % pattern != 0 for i in range(layers)]
    if fields.get("use_sliding_window"):
        return [i >= fields.get("max_window_layers", 28) for i in range(layers)]
    return [False] * layers


def _turning(fields: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers have rotary positions."""
    if fields.get("no_rope_layers") is not None:
        turning = [bool(turns) for turns in fields["no_rope_layers"]]  # 1 where there is one, whatever its name says
        if len(turning) != layers:
            raise ValueError(f"expected no_rope_layers of {layers} numbers, got {len(turning)}")
        return turning
    interval = fields.get("no_rope_layer_interval")
    return [interval is None or (i + 1) % interval != 0 for i in range(layers)]


def _rope(fields: Mapping[str, Any], context: int | None, local: bool, turns: bool) -> Rope:
    """The rotary embedding of a layer; transformers 5 has `rope_parameters` for the `rope_theta` and others of 4."""
    parameters, share = fields.get("rope_parameters"), fields.get("partial_rotary_factor", 1.0)
    if not turns:
        return Rope(1.0, "none")
    if parameters is not None:
        if "full_attention" in parameters:
            parameters = parameters["sliding_attention" if local else "full_attention"]
        share = parameters.get("partial_rotary_factor", share)
        return _parsed(fields, parameters.get("rope_theta", 1e4), parameters, share, context)
    if local and "rope_local_base_freq" in fields:
        return Rope(float(fields["rope_local_base_freq"]))
    return _parsed(fields, fields.get("rope_theta", 1e4), fields.get("rope_scaling") or {}, share, context)


def _parsed(
    fields: Mapping[str, Any], theta: float, scaling: Mapping[str, Any], share: float, context: int | None
) -> Rope:
    """`Rope.parse`, of a longrope with what stands beside it in the file."""
    if "longrope" not in (scaling.get("rope_type"), scaling.get("type")):
        return Rope.parse(theta, scaling, share)
    longest = check_int("max_position_embeddings", _need(fields, "max_position_embeddings"), 1, 2**31)
    original = scaling.get("original_max_position_embeddings") or _need(fields, "original_max_position_embeddings")
    lengths = {"original_max_position_embeddings": original, "factor": scaling.get("factor") or longest / original}
    context = longest if context is None else check_int("context", context, 1, longest)
    return Rope.parse(theta, {**scaling, **lengths}, share, long=context > original)
