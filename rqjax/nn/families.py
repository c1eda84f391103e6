"""Traits of the supported families that are not in the fields of a `config.json`."""

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
"""Activations of MLPs, by `hidden_act`."""


class Family(NamedTuple):
    """Traits of one family. In all families attention and MLP are added to their input."""

    norm_before: bool = True
    """True if inputs of attention and MLP are normalized."""
    norm_behind: bool = False
    """True if outputs of attention and MLP are normalized before they are added."""
    unit_offset: bool = False
    """True if norms multiply by 1 + w in the place of w."""
    qk_norm: Literal["head", "whole"] | None = None
    """Normalization of queries and keys: head by head, or those of all heads together."""
    qkv_bias: bool = False
    """True if projections to queries, keys and values have biases, whatever `attention_bias` says."""
    out_bias: bool = True
    """True if the projection to the output has a bias where `attention_bias` says so."""
    sinks: bool = False
    """True if each head has a learned sink (`sink_logits` of `rqjax.attend`)."""
    root_scale: bool = False
    """True if embeddings are multiplied by sqrt(hidden_size)."""
    windows: int | Literal["all", "upper", "unturned"] | None = None
    """Layers that see only `sliding_window` tokens, where there are no `layer_types`. A number n: all but every n-th;
    "all": all; "upper": those from `max_window_layers` on; "unturned": those without rotary positions; None: none."""
    partial: bool = False
    """True if rotary positions of the default kind read `partial_rotary_factor`."""
    rope: Mapping[str, Any] = {}
    """The `rope_parameters` of a config without them."""
    rope_types: Mapping[str, str] = {}
    """Kinds of rotary positions that the class takes, and the kinds that they mean; all kinds, if empty."""
    interleaved: bool = False
    """True if coordinates 2i and 2i + 1 turn together; they are loaded in the order of the other families."""
    experts: Literal["apart", "packed"] | None = None
    """Layout of experts in checkpoints, if there are any. "apart": tensors for each expert. "packed": one tensor
    (experts, in, out) for all, whose columns of gate and up alternate."""
    expert_bias: bool = False
    """True if experts and their router have biases."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Function from a router's scores to weights; with sigmoids each expert has a learned bias for the choice alone."""
    latent: bool = False
    """True if keys and values of all heads are projected from one latent a token (`rqjax.nn.latent`)."""
    names: Mapping[str, str] = {}
    """Names of modules in checkpoints, where they are not those of Llama or Gemma."""
    fused: Mapping[str, tuple[str, ...]] = {}
    """Modules whose rows lie in one tensor."""
    normalized: bool = False
    """True if the weights of a token's experts add up to 1, whatever `norm_topk_prob` says."""


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
"""Families by `model_type`. Only the text part of gemma3, which also takes images, is read."""

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
