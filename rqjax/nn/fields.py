"""The fields of a `config.json` that each family reads, and the values that Hugging Face's classes fill in."""

from collections.abc import Mapping
from typing import Any

from rqjax.core import check_int, check_positive

Fields = dict[str, Any]

NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
"""Names of the sizes that a row of `SIZES` has."""
SIZES: dict[str, tuple[int | None, ...]] = {
    "llama": (32_000, 4096, 11_008, 32, 32, None, None, 2048),
    "mistral": (32_000, 4096, 14_336, 32, 32, 8, None, 131_072),
    "qwen2": (151_936, 4096, 22_016, 32, 32, 32, None, 32_768),
    "qwen3": (151_936, 4096, 22_016, 32, 32, 32, 128, 32_768),
    "gemma2": (256_000, 2304, 9216, 26, 8, 4, 256, 8192),
    "gemma3_text": (262_208, 2304, 9216, 26, 8, 4, 256, 131_072),
    "phi3": (32_064, 3072, 8192, 32, 32, None, None, 4096),
    "olmo2": (50_304, 4096, 11_008, 32, 32, None, None, 2048),
    "smollm3": (128_256, 2048, 11_008, 36, 16, 4, None, 32_768),
    "granite": (32_000, 4096, 11_008, 32, 32, None, None, 2048),
    "mixtral": (32_000, 4096, 14_336, 32, 32, 8, None, 131_072),
    "qwen3_moe": (151_936, 2048, 6144, 24, 32, 4, None, 32_768),
    "gpt_oss": (201_088, 2880, 2880, 36, 64, 8, 64, 131_072),
    "deepseek_v2": (102_400, 4096, 11_008, 32, 32, None, None, 2048),
    "deepseek_v3": (129_280, 7168, 18_432, 61, 128, None, None, 4096),
    "glm": (151_552, 4096, 13_696, 40, 32, 2, 128, 131_072),
    "glm4": (151_552, 4096, 13_696, 40, 32, 2, 128, 131_072),
}
"""Sizes by `model_type`."""
COMMON: Fields = dict(rms_norm_eps=1e-6, tie_word_embeddings=False, rope_theta=1e4, partial_rotary_factor=1.0)
COMMON |= dict(rope_scaling=None, rope_parameters=None, eos_token_id=None)
LENGTH = dict(original_max_position_embeddings=None)
PLAIN = LENGTH | dict(hidden_act="silu")
BIASED = PLAIN | dict(attention_bias=False)
LLAMA = BIASED | dict(mlp_bias=False)
WINDOWS = dict(sliding_window=4096, layer_types=None)
QWEN = PLAIN | WINDOWS | dict(use_sliding_window=False, max_window_layers=28)
GEMMA: Fields = WINDOWS | dict(attention_bias=False, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
GEMMA |= dict(query_pre_attn_scalar=256, use_bidirectional_attention=False)
LATENT = BIASED | dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
GLM = PLAIN | dict(attention_bias=True, rms_norm_eps=1.5625e-7, partial_rotary_factor=0.5)
OTHERS: dict[str, Fields] = {
    "llama": LLAMA,
    "mistral": PLAIN | WINDOWS,
    "qwen2": QWEN,
    "qwen3": QWEN | BIASED,
    "gemma2": GEMMA | LENGTH | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma3_text": GEMMA
    | dict(final_logit_softcapping=None, rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6),
    "phi3": PLAIN | dict(original_max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None),
    "olmo2": BIASED | dict(rms_norm_eps=1e-5),
    "smollm3": LLAMA
    | dict(rope_theta=2e6, no_rope_layers=None, no_rope_layer_interval=4, tie_word_embeddings=True)
    | dict(use_sliding_window=False, sliding_window=None, layer_types=None),
    "granite": LLAMA
    | dict(embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0),
    "mixtral": PLAIN
    | dict(rope_theta=1e6, rms_norm_eps=1e-5, sliding_window=None, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_moe": BIASED
    | dict(use_sliding_window=False, sliding_window=4096, num_local_experts=128, num_experts_per_tok=8)
    | dict(moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=None, norm_topk_prob=False),
    "gpt_oss": LENGTH
    | dict(attention_bias=True, rope_theta=1.5e5, rms_norm_eps=1e-5, sliding_window=128, layer_types=None)
    | dict(num_local_experts=128, num_experts_per_tok=4, swiglu_alpha=1.702, swiglu_limit=7.0),
    "deepseek_v2": LATENT
    | dict(mlp_bias=False, n_routed_experts=64, num_experts_per_tok=None, moe_intermediate_size=1407)
    | dict(n_shared_experts=2, routed_scaling_factor=1.0, first_k_dense_replace=0)
    | dict(topk_method="greedy", n_group=None, topk_group=None),
    "deepseek_v3": LATENT
    | dict(num_local_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, norm_topk_prob=True)
    | dict(n_shared_experts=1, routed_scaling_factor=2.5, first_k_dense_replace=3, n_group=8, topk_group=4)
    | dict(rope_interleave=True, num_nextn_predict_layers=1),
    "glm": GLM,
    "glm4": GLM,
}
"""Fields by `model_type`. Others are ignored, as Hugging Face's classes ignore them."""
OPTIONAL = {
    *("num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank", "norm_topk_prob", "rope_interleave"),
    *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    *("partial_rotary_factor", "num_nextn_predict_layers"),
}
"""Fields that may be null, beside those whose default is null."""
LISTS = {"layer_types", "mlp_only_layers", "no_rope_layers"}
KINDS = {list: "a list", bool: "true or false", str: "a string"}
EXPERTS = {"num_experts": "num_local_experts"}
ALIASES: dict[str, dict[str, str]] = {
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"},
}
"""Names of fields in a file, by `model_type`, and the names that they have here."""


def read(model_type: str, given: Mapping[str, Any]) -> Fields:
    """Returns the fields that a family reads, with the values of a `config.json` or those that are filled in.

    Raises:
      ValueError: a field is null or of another type; it is named.
    """
    aliases = ALIASES.get(model_type, {})
    defaults = dict(zip(NAMES, SIZES[model_type], strict=True)) | COMMON | OTHERS[model_type]
    named = {aliases.get(name, name): value for name, value in given.items()}
    fields = {name: named.get(name, default) for name, default in defaults.items()}
    for name, default in defaults.items():
        value = fields[name]
        if value is None and (default is None or name in OPTIONAL):
            continue
        need(fields, name)
        kind = list if name in LISTS else type(default)
        if kind in KINDS and not isinstance(value, kind):
            raise ValueError(f"expected {name} to be {KINDS[kind]} in config.json, got {value!r}")
        if isinstance(default, float):
            fields[name] = check_positive(name, value)
    return fields


def need(fields: Mapping[str, Any], name: str) -> Any:
    """Returns a field that may not be null."""
    if fields.get(name) is None:
        raise ValueError(f"config.json has no {name!r}")
    return fields[name]


def whole(fields: Mapping[str, Any], name: str, low: int = 1, high: int = 2**31, default: int | None = None) -> int:
    """Returns a whole number in a field; `default` if it is null."""
    value = default if fields.get(name) is None else fields[name]
    return check_int(name, need({name: value}, name), low, high)


def need_object(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns an object in a field, or an empty one for null."""
    value = fields.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"expected {name} to be an object in config.json, got {value!r}")
    return value or {}


def token_ids(value: Any) -> tuple[int, ...]:
    """Returns the ids in an `eos_token_id`, which is one id, a list or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(check_int("eos_token_id", token, -1, 2**31) for token in ids)
