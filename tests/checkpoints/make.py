"""Makes the tiny checkpoints beside it, and the logits that Hugging Face's own classes compute from them.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/checkpoints/make.py [FAMILY ...]

Every weight is random, biases and norms included, so that none can be left out unnoticed.
"""

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
            "attn_logit_softcapping": 20.0,
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
LONG = ("llama", "gpt_oss")
"""Families with logits of a text of 700 tokens, of every fiftieth."""


def long_logits(model: torch.nn.Module, folder: Path) -> None:
    tokens = torch.randint(3, COMMON["vocab_size"], (1, 700), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits[:, 49::50]
    np.savez(folder / "long.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())


def main() -> None:
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
            # Gemma 3's class leaves its own soft limit of scores to the caller.
            limit = {"softcap": fields["attn_logit_softcapping"]} if name == "gemma3_text" else {}
            logits = {"logits": model(tokens, **limit).logits}
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
