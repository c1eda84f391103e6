"""What distinguishes the supported families beside the numbers of a `config.json`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array

from rqjax.core import Registry

TANH = functools.partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": TANH,
    "gelu_new": TANH,
    "gelu_fast": TANH,
    "relu": jax.nn.relu,
}
"""Of MLPs, by `hidden_act`."""


class Family(NamedTuple):
    """One family; in all, attention and MLP are added to what they are made of."""

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
    windows: int | Literal["all", "upper", "unturned"] | None = None
    """Which layers see `sliding_window` tokens only where there are no `layer_types`: all but each so many-th; all;
    those from `max_window_layers` on; those without rotary positions; None: no layer."""
    partial: bool = False
    """Whether rotary positions of the default kind read `partial_rotary_factor`."""
    rope: Mapping[str, Any] = {}
    """The `rope_parameters` of a config without them."""
    rope_types: Mapping[str, str] = {}
    """Kinds of rotary positions that the class takes, and as which; all, if there are none."""
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
    normalized: bool = False
    """Whether the weights of a token's experts add up to 1, whatever `norm_topk_prob` says."""


QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}

GEMMA_2 = Family(norm_behind=True, unit_offset=True, root_scale=True, windows=2)
GEMMA_3 = GEMMA_2._replace(qk_norm="head", windows=6)
GLM = Family(out_bias=False, interleaved=True, partial=True, fused=GATE_UP)
MIXTRAL = Family(
    windows="all",
    experts="apart",
    normalized=True,
    names={"mlp": "block_sparse_moe", "router": "gate", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
)
GPT_OSS = Family(
    windows=2,
    sinks=True,
    experts="packed",
    expert_bias=True,
    normalized=True,
    rope={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
)
DEEPSEEK_V2 = Family(latent=True, interleaved=True, experts="apart", names={"router": "gate"})
FAMILIES: dict[str, Family] = Registry(
    "architecture (model_type of config.json)",
    {
        "llama": Family(),
        "mistral": Family(windows="all"),
        "qwen2": Family(qkv_bias=True, out_bias=False, windows="upper"),
        "qwen3": Family(qk_norm="head", windows="upper"),
        "gemma2": GEMMA_2,
        "gemma3_text": GEMMA_3,
        "gemma3": GEMMA_3,
        "phi3": Family(
            windows="all",
            partial=True,
            fused=QKV | GATE_UP,
            rope_types={"default": "default", **dict.fromkeys(("su", "yarn", "longrope"), "longrope")},
        ),
        "olmo2": Family(norm_before=False, norm_behind=True, qk_norm="whole"),
        "smollm3": Family(windows="unturned"),
        "granite": Family(),
        "mixtral": MIXTRAL,
        "qwen3_moe": Family(qk_norm="head", windows="all", experts="apart", names={"router": "gate"}),
        "gpt_oss": GPT_OSS,
        "deepseek_v2": DEEPSEEK_V2,
        "deepseek_v3": DEEPSEEK_V2._replace(router="sigmoid"),
        "glm": GLM,
        "glm4": GLM._replace(
            norm_behind=True,
            names={
                "post_attention_layernorm": "post_self_attn_layernorm",
                "pre_feedforward_layernorm": "post_attention_layernorm",
                "post_feedforward_layernorm": "post_mlp_layernorm",
            },
        ),
    },
)
"""By `model_type`. Of gemma3, which also sees, the text part is read."""

MISSING: dict[str, tuple[str, str]] = {
    "cohere2": ("llama", "attention and MLP side by side, LayerNorm"),
    "deepseek_v32": ("deepseek_v3", "a sparse choice of the tokens that are attended to"),
    "falcon": ("llama", "attention and MLP side by side, LayerNorm"),
    "gemma3n": ("gemma3_text", "layers that share caches, embeddings of each layer"),
    "gemma4": ("gemma3_text", "layers that share caches"),
    "glm4_moe": ("deepseek_v3", "such experts beside heads of keys and values"),
    "gpt2": ("llama", "learned positions, LayerNorm"),
    "gpt_neox": ("llama", "attention and MLP side by side, LayerNorm"),
    "llama4": ("mixtral", "attention to chunks, shared experts, sigmoids of the router's scores"),
    "mistral3": ("mistral", "text within text_config, names of such tensors"),
    "opt": ("llama", "learned positions, LayerNorm"),
    "phi": ("phi3", "attention and MLP side by side, LayerNorm"),
    "qwen2_moe": ("qwen3_moe", "a gate of its shared expert"),
    "qwen3_next": ("qwen3_moe", "linear attention in most layers, gates of attention and of shared experts"),
}
"""The nearest supported family and what is missing, for families that are often asked for."""
