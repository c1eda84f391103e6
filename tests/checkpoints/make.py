"""Makes the tiny checkpoints beside it, and the logits that Hugging Face's own classes compute from them.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/checkpoints/make.py [FAMILY ... | configs]

Every weight is random, biases and norms included, so that none can be left out unnoticed. `configs` writes what Hugging
Face's classes make of a `config.json` with fields left out, null or in other places (configs.json).
"""

import contextlib
import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TWO_HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"head_dim": 32, "rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "mistral": (transformers.MistralConfig, {"head_dim": 32, "sliding_window": 16}),
    "qwen2": (transformers.Qwen2Config, {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            },
            "attn_logit_softcapping": 20.0,  # which Gemma 3's class does not read
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma2": (
        transformers.Gemma2Config,
        {
            **TWO_HEADS,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 16,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "phi3": (transformers.Phi3Config, {**TWO_HEADS, "partial_rotary_factor": 0.75, "sliding_window": 16}),
    "phi3_longrope": (
        transformers.Phi3Config,
        {
            **TWO_HEADS,
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0 + 0.05 * i for i in range(12)],
                "long_factor": [1.0 + 0.4 * i for i in range(12)],
            },
        },
    ),
    "olmo2": (transformers.Olmo2Config, TWO_HEADS),
    "smollm3": (transformers.SmolLM3Config, {**TWO_HEADS, "no_rope_layers": [1, 0]}),
    "granite": (
        transformers.GraniteConfig,
        {
            **TWO_HEADS,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
        },
    ),
    "glm": (transformers.GlmConfig, {**TWO_HEADS, "head_dim": 32, "attention_bias": True}),
    "glm4": (transformers.Glm4Config, {**TWO_HEADS, "head_dim": 32, "attention_bias": True}),
    "mixtral": (
        transformers.MixtralConfig,
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_hidden_layers": 3,
            "head_dim": 32,
            "moe_intermediate_size": 16,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        {
            "head_dim": 32,
            "swiglu_limit": 1.0,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            **LATENT,
            "num_hidden_layers": 3,
            "q_lora_rank": 24,
            "attention_bias": True,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.2,
                "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 64,
            },
        },
    ),
}
TIME = 48
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn by length": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512},
    "yarn of DeepSeek": {"type": "yarn", "factor": 40, "beta_fast": None, "mscale": 0.7, "mscale_all_dim": 0.9},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "longrope": {"type": "longrope", "short_factor": [1.1] * 64, "long_factor": [3.0] * 64},
    "unknown": {"type": "mrope", "factor": 2.0},
    "null": {"type": None},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "empty": {},
}
NULLS = [
    *("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_parameters", "rope_scaling"),
    *("mlp_only_layers", "no_rope_layers", "attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank"),
    *("attention_bias", "rms_norm_eps", "vocab_size", "hidden_act", "tie_word_embeddings", "use_sliding_window"),
    *("num_hidden_layers", "norm_topk_prob", "eos_token_id", "use_bidirectional_attention"),
]
SOME = (0, 1, 2, 3, 4, 5, 27, 28)
"""Layers whose facts are written."""
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 6}, "mistral": {"head_dim": 128}, "mixtral": {"head_dim": 128}}
"""Fields that classes cannot do without."""
BY_LAYER = ("ministral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3", "gpt_oss")
WINDOWED = ("mistral", "mixtral", "phi3", "qwen3_moe")
"""Families whose classes read `layer_types`, and those whose layers all have the `sliding_window`."""
TYPES = ["sliding_attention", "full_attention"] * 2
CHANGES = (
    [{name: None} for name in NULLS]
    + [{"rope_theta": 7e4, "rope_scaling": rope} for rope in ROPES.values()]
    + [{"rope_parameters": rope} for rope in ROPES.values()]
    + [
        {"rope_theta": 7e4},
        {"rope_theta": "70000"},
        {"rope_parameters": {"rope_theta": 8e4, "rope_type": "default"}, "rope_theta": 7e4},
        {"rope_parameters": ROPES["yarn"], "original_max_position_embeddings": 256},
        {"rope_parameters": {"full_attention": {"rope_theta": 8e4}, "sliding_attention": ROPES["linear"]}},
        {"partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.25, "rope_scaling": ROPES["linear"]},
        {"rope_local_base_freq": 300.0},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 4},
        {"sliding_window": 64, "num_hidden_layers": 4, "layer_types": TYPES},
        {"sliding_window_pattern": 3},
        {"_sliding_window_pattern": 3},
        {"no_rope_layer_interval": 2, "num_hidden_layers": 4},
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": "true"},
        {"hidden_act": "swish"},
        {"hidden_activation": "gelu"},
        {"rms_norm_eps": "1e-5"},
        {"embedding_multiplier": 12, "logits_scaling": 8, "attention_multiplier": 0.5, "residual_multiplier": 0.25},
        {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 9.0, "query_pre_attn_scalar": 100},
        {"num_local_experts": 16},
        {"num_experts": 16},
        {"n_routed_experts": 16},
        {"norm_topk_prob": True},
        {"norm_topk_prob": False},
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
        {"topk_method": "greedy", "n_group": 8, "topk_group": 3, "num_experts_per_tok": 6},
        {"moe_layer_freq": 2},
        {"hidden_size": 8192, "num_attention_heads": 64},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"unknown": 1},
    ]
)


def facts(given: dict) -> dict:
    """Returns the facts that a class derives from a config.json's fields, with its model's modules on no device."""
    if given["model_type"] == "mistral" and "layer_types" in given:
        given = {**given, "model_type": "ministral"}  # as `from_pretrained` takes it
    config = transformers.AutoConfig.for_model(**copy.deepcopy(given))  # it writes to what it is given
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).model
    attention, names = model.layers[0].self_attn, [name for name, _ in model.layers[0].named_parameters()]
    biased = [name.rsplit(".", 2)[1] for name in names if name.endswith("proj.bias")]
    rotary = type(model.rotary_emb)(config)
    layers = config.num_hidden_layers
    if config.model_type in BY_LAYER:
        kinds = config.layer_types
    else:
        windowed = config.model_type in WINDOWED and config.sliding_window is not None
        kinds = ["sliding_attention" if windowed else "full_attention"] * layers
    if "sliding_attention" in kinds and config.sliding_window is None:
        raise ValueError("what a call of the model raises")
    ropes = {}
    for kind in dict.fromkeys(kinds):
        prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        frequencies = getattr(rotary, f"{prefix}inv_freq").double().numpy()
        whole = getattr(attention, "qk_rope_head_dim", getattr(attention, "head_dim", None))
        if 2 * len(frequencies) != whole and config.model_type not in ("phi3", "glm", "glm4"):
            raise ValueError("what a call of the model raises")
        picked = frequencies[[1, len(frequencies) // 2, -1]]
        ropes[kind] = [float(f"{x:.7g}") for x in (*picked, getattr(rotary, f"{prefix}attention_scaling"))]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    experts = {}
    sparse = [hasattr(layer.mlp, "experts") for layer in model.layers]
    if any(sparse):
        block = model.layers[sparse.index(True)].mlp
        router = next(module for name, module in block.named_children() if name in ("gate", "router"))
        shared = getattr(block, "shared_experts", None)
        grouped = getattr(router, "topk_method", "grouped") != "greedy" and hasattr(router, "num_group")
        experts = {
            "experts": [block.experts.num_experts, router.top_k],
            "sparse": [sparse[i] for i in SOME if i < layers],
            "shared": shared.down_proj.in_features if shared else 0,
            "routed_scaling_factor": getattr(router, "routed_scaling_factor", 1.0),
            "groups": [router.num_group, router.topk_group] if grouped else [1, 1],
            "norm_topk_prob": bool(getattr(router, "norm_topk_prob", not hasattr(router, "topk_method"))),
        }
    latent = hasattr(attention, "kv_lora_rank")
    return {
        **{name: getattr(config, name) for name in sizes if not (latent and name == "num_key_value_heads")},
        "head_dim": attention.qk_head_dim if latent else attention.head_dim,
        "num_hidden_layers": layers,
        "windows": [config.sliding_window if kinds[i] == "sliding_attention" else None for i in SOME if i < layers],
        "ropes": list(ropes.values()),
        "turns": [bool(getattr(model.layers[i].self_attn, "use_rope", True)) for i in SOME if i < layers],
        "activation": config.hidden_activation if config.model_type.startswith("gemma") else config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "biases": [bool({"q_proj", "qkv_proj", "q_a_proj"} & {*biased}), "o_proj" in biased, "up_proj" in biased],
        "scale": attention.scaling,
        "softcaps": [
            getattr(attention, "attn_logit_softcapping", None) if config.model_type != "gemma3_text" else None,
            getattr(config, "final_logit_softcapping", None) if config.model_type.startswith("gemma") else None,
        ],
        **experts,
    }


def configs() -> None:
    """Writes for each family the facts of a config.json without fields, and those that some change, or a refusal."""
    table = {}
    for family in sorted({config_class.model_type for config_class, _ in FAMILIES.values()}):
        start = {"model_type": family, **NEEDED.get(family, {})}
        usual = facts(start)
        table[family] = [[start, usual]]
        for change in CHANGES:
            found = None
            with contextlib.suppress(Exception):
                found = {name: fact for name, fact in facts({**start, **change}).items() if fact != usual[name]}
            table[family].append([change, found])
        print(family, sum(found is None for _, found in table[family]), "refused", flush=True)
    lines = (f'"{family}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for family, rows in table.items())
    (Path(__file__).parent / "configs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


LONG = {"llama": 700, "gpt_oss": 3000, "gemma3_text": 3000}
"""Tokens of families with a long text, and logits of every fiftieth."""


def long_logits(model: torch.nn.Module, folder: Path) -> None:
    shape = 1, LONG[folder.name]
    tokens = torch.randint(3, COMMON["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits[:, 49::50]
    np.savez(folder / "long.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def main() -> None:
    if sys.argv[1:] == ["configs"]:
        configs()
        return
    for name in sys.argv[1:] or FAMILIES:
        config_class, fields = FAMILIES[name]
        torch.manual_seed(0)
        config = config_class(**{**COMMON, **fields}, attn_implementation="eager")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            biases = [pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias")]
            for parameter_name, parameter in [*model.named_parameters(), *biases]:
                scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
                if parameter_name.endswith(("o_proj.weight", "down_proj.weight")):  # as GPT-2 begins
                    scale /= (2 * config.num_hidden_layers) ** 0.5
                offset = 1.0 if "norm" in parameter_name and not name.startswith("gemma") else 0.0
                parameter.copy_(offset + scale * torch.randn_like(parameter))
            tokens = torch.randint(3, COMMON["vocab_size"], (2, TIME))
            logits = {"logits": model(tokens).logits}
            if name == "phi3_longrope":  # a text of the original length turns by other frequencies
                logits["short"] = model(tokens[:, :32]).logits
        folder = Path(__file__).parent / name
        model.save_pretrained(folder, max_shard_size="40KB" if name == "mistral" else "5GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        arrays = {which: x.numpy() for which, x in logits.items()}
        np.savez(folder / "logits.npz", tokens=tokens.numpy().astype(np.int32), **arrays)
        if name in LONG:
            long_logits(model, folder)
        print(name, sum(p.numel() for p in model.parameters()), float(abs(arrays["logits"]).max()))


if __name__ == "__main__":
    main()
