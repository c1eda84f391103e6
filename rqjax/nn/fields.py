"""The fields of a `config.json` that each family reads, and the values that Hugging Face's classes fill in."""

from collections.abc import Mapping
from typing import Any

from rqjax.core import check_int, check_positive

Fields = dict[str, Any]


def _but(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


COMMON: Fields = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": 1.0,
    "eos_token_id": None,
}
BIASED = COMMON | {"attention_bias": False}
LLAMA = BIASED | {"mlp_bias": False}
MISTRAL = COMMON | {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
QWEN = {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
GEMMA_2 = _but(BIASED, "hidden_act") | {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": False,
}
GLM = BIASED | {
    "vocab_size": 151_552,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
DEEPSEEK_V2 = LLAMA | {
    "vocab_size": 102_400,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
FIELDS: dict[str, Fields] = {
    "llama": LLAMA,
    "mistral": MISTRAL | {"sliding_window": 4096, "layer_types": None},
    "qwen2": COMMON | QWEN,
    "qwen3": BIASED | QWEN | {"head_dim": 128},
    "gemma2": GEMMA_2,
    "gemma3_text": _but(GEMMA_2, "attn_logit_softcapping", "original_max_position_embeddings")
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 6,
    },
    "phi3": COMMON
    | {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "olmo2": BIASED | {"vocab_size": 50_304, "rms_norm_eps": 1e-5},
    "smollm3": LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "granite": LLAMA
    | {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "mixtral": MISTRAL
    | {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": BIASED
    | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
    },
    "gpt_oss": _but(BIASED, "hidden_act")
    | {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "attention_bias": True,
        "rope_theta": 1.5e5,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": _but(DEEPSEEK_V2, "mlp_bias", "topk_method", "n_routed_experts")
    | {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
    },
    "glm": GLM,
    "glm4": GLM,
}
"""By `model_type`; fields that are not here are ignored, as Hugging Face's classes ignore them."""
OPTIONAL = {
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "q_lora_rank",
    "norm_topk_prob",
    "rope_interleave",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "partial_rotary_factor",
    "num_nextn_predict_layers",
}
"""Fields that may be null, beside those that are null where they are left out."""
LISTS = {"layer_types", "mlp_only_layers", "no_rope_layers"}
ALIASES: dict[str, dict[str, str]] = {
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "gpt_oss": {"num_experts": "num_local_experts"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
"""Names in a file, by `model_type`, of fields that have others here."""


def read(model_type: str, given: Mapping[str, Any]) -> Fields:
    """Returns the fields that a family reads, with the values of a `config.json` or those that are filled in.

    Raises:
      ValueError: a field is null or of another type; it is named.
    """
    aliases, defaults = ALIASES.get(model_type, {}), FIELDS[model_type]
    named = {aliases.get(name, name): value for name, value in given.items()}
    fields = {name: named.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        value = fields[name]
        if value is None and (default is None or name in OPTIONAL):
            continue
        need(fields, name)
        if name in LISTS and not isinstance(value, list):
            raise ValueError(f"expected {name} to be a list in config.json, got {value!r}")
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"expected {name} to be true or false in config.json, got {value!r}")
        if isinstance(default, str) and not isinstance(value, str):
            raise ValueError(f"expected {name} to be a string in config.json, got {value!r}")
        if isinstance(default, float):
            fields[name] = check_positive(name, value)
    return fields


def need(fields: Mapping[str, Any], name: str) -> Any:
    """A field that may not be null."""
    if fields.get(name) is None:
        raise ValueError(f"config.json has no {name!r}")
    return fields[name]


def need_object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object in a field, or an empty one for null."""
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"expected {name} to be an object in config.json, got {value!r}")
    return value or {}


def token_ids(value: Any) -> tuple[int, ...]:
    """The ids in an `eos_token_id`, which is one, a list or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_int("eos_token_id", token, -1, 2**31) for token in ids)
