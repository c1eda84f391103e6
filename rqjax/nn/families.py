"""What distinguishes the supported families beside the numbers of a `config.json`."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

SILU, GELU = ("hidden_act", "silu"), ("hidden_activation", "gelu_pytorch_tanh")
"""Fields that say the activation of the MLP, and what they have to say."""


class Family(NamedTuple):
    """One family; in all, attention and MLP are added to what they are made of."""

    activation: tuple[str, str] = SILU
    norm_before: bool = True
    norm_behind: bool = False
    """Whether attention and MLP are normalized before, and what they make before it is added."""
    unit_offset: bool = False
    """Whether norms multiply by 1 + w in the place of w."""
    qk_norm: Literal["head", "whole"] | None = None
    """How queries and keys are normalized: head by head, or those of all heads together."""
    qkv_bias: bool = False
    """Whether projections to queries, keys and values have one, whatever `attention_bias` says."""
    out_bias: bool = True
    """Whether that to the output has one, where `attention_bias` says so."""
    sinks: bool = False
    """Whether each head has a learned sink (`sink_logits` of `rqjax.attend`)."""
    root_scale: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    windows: int | Literal["all"] | None = None
    """Which layers see `sliding_window` tokens only where there are no `layer_types`: all but each so many-th; None:
    as Qwen's `use_sliding_window` says."""
    interleaved: bool = False
    """Whether coordinates 2i and 2i + 1 turn together; they are loaded in the order of the others."""
    experts: Literal["apart", "packed"] | None = None
    """Whether there are experts, and how checkpoints hold them: each in tensors of its own, or all in one of shape
    (experts, in, out), whose columns of gate and up take turns."""
    expert_bias: bool = False
    """Whether experts and their router have biases."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """What makes weights of a router's scores; with sigmoids each expert has a learned bias while they are chosen."""
    latent: bool = False
    """Whether keys and values of all heads are made of one latent a token (`rqjax.nn.latent`)."""
    names: Mapping[str, str] = {}
    """Of modules in checkpoints, where they are not those of Llama or Gemma."""
    fused: Mapping[str, tuple[str, ...]] = {}
    """Modules whose rows lie in one tensor."""
    defaults: Mapping[str, Any] = {}
    """What Hugging Face's own classes fill in where a config.json leaves it out."""


QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}

GEMMA_2 = Family(
    GELU,
    norm_behind=True,
    unit_offset=True,
    root_scale=True,
    windows=2,
    defaults={
        "head_dim": 256,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
GEMMA_3 = GEMMA_2._replace(
    qk_norm="head",
    windows=6,
    defaults={
        **GEMMA_2.defaults,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "vocab_size": 262_208,
    },
)
GLM = Family(
    out_bias=False,
    interleaved=True,
    fused=GATE_UP,
    defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
)
MIXTRAL = Family(
    windows="all",
    experts="apart",
    names={
        "mlp": "block_sparse_moe",
        "router": "gate",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
    defaults={"norm_topk_prob": True, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
)
GPT_OSS = Family(
    windows=2,
    sinks=True,
    experts="packed",
    expert_bias=True,
    defaults={
        "head_dim": 64,
        "attention_bias": True,
        "rope_theta": 1.5e5,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "norm_topk_prob": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
)
DEEPSEEK_V2 = Family(
    latent=True,
    interleaved=True,
    experts="apart",
    names={"router": "gate"},
    defaults={
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    },
)
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows="all", defaults={"sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, out_bias=False),
    "qwen3": Family(qk_norm="head", defaults={"head_dim": 128}),
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_3,
    "gemma3": GEMMA_3,
    "phi3": Family(windows="all", fused=QKV | GATE_UP),
    "olmo2": Family(norm_before=False, norm_behind=True, qk_norm="whole"),
    "smollm3": Family(defaults={"no_rope_layer_interval": 4, "tie_word_embeddings": True}),
    "granite": Family(),
    "mixtral": MIXTRAL,
    "qwen3_moe": Family(qk_norm="head", experts="apart", names={"router": "gate"}, defaults={"head_dim": 128}),
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V2._replace(
        router="sigmoid",
        defaults={
            **DEEPSEEK_V2.defaults,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm": GLM,
    "glm4": GLM._replace(
        norm_behind=True,
        names={
            "post_attention_layernorm": "post_self_attn_layernorm",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_mlp_layernorm",
        },
    ),
}
"""By `model_type`. Of gemma3, which also sees, the text part is read."""

MISSING: dict[str, tuple[str, str]] = {
    "bloom": ("llama", "positions as biases of scores, LayerNorm"),
    "cohere": ("llama", "attention and MLP side by side, LayerNorm"),
    "cohere2": ("llama", "attention and MLP side by side, LayerNorm"),
    "dbrx": ("mixtral", "LayerNorm, clipped queries, keys and values"),
    "deepseek_v32": ("deepseek_v3", "a sparse choice of the tokens that are attended to"),
    "falcon": ("llama", "attention and MLP side by side, LayerNorm"),
    "falcon_mamba": ("llama", "state spaces in the place of attention"),
    "gemma3n": ("gemma3_text", "layers that share caches, embeddings of each layer"),
    "gemma3n_text": ("gemma3_text", "layers that share caches, embeddings of each layer"),
    "gemma4": ("gemma3_text", "layers that share caches"),
    "glm4_moe": ("deepseek_v3", "such experts beside heads of keys and values"),
    "gpt2": ("llama", "learned positions, LayerNorm"),
    "gpt_neox": ("llama", "attention and MLP side by side, LayerNorm"),
    "granitemoe": ("mixtral", "its names of tensors, scales of what layers add"),
    "jamba": ("mixtral", "state spaces in most layers"),
    "llama4": ("mixtral", "attention to chunks, shared experts, sigmoids of the router's scores"),
    "llama4_text": ("mixtral", "attention to chunks, shared experts, sigmoids of the router's scores"),
    "mamba": ("llama", "state spaces in the place of attention"),
    "mamba2": ("llama", "state spaces in the place of attention"),
    "nemotron": ("llama", "LayerNorm, MLP without a gate"),
    "olmo": ("olmo2", "LayerNorm without weights"),
    "olmoe": ("qwen3_moe", "norms of all heads together beside experts, clipped queries, keys and values"),
    "opt": ("llama", "learned positions, LayerNorm"),
    "phi": ("phi3", "attention and MLP side by side, LayerNorm"),
    "phimoe": ("mixtral", "LayerNorm, its own router"),
    "qwen2_moe": ("qwen3_moe", "a gate of its shared expert"),
    "qwen3_next": ("qwen3_moe", "linear attention in most layers, gates of attention and of shared experts"),
    "stablelm": ("llama", "LayerNorm"),
    "starcoder2": ("mistral", "LayerNorm, MLP without a gate"),
}
"""Of families that are not supported, the nearest one that is, and what would be to do."""
