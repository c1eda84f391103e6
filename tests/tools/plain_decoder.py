"""A decoder without a cache in NumPy, in float64: what Llama and Qwen 2 compute, written out from their equations."""

import json

import numpy as np
from safetensors.flax import load_file


def logits(folder, tokens):
    """Logits (time, vocabulary) of a text (time,) by the checkpoint in a folder."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: np.asarray(x, np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    dim, time = config["head_dim"], len(tokens)
    frequencies = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    angles = np.arange(time)[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def normalized(name, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def turned(x):
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    def attention(name, x):
        q, k, v = (linear(f"{name}.{part}_proj", x).reshape(time, -1, dim) for part in "qkv")
        q, k = turned(q), turned(k)
        k, v = (np.repeat(part, q.shape[1] // part.shape[1], axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        chances /= chances.sum(-1, keepdims=True)
        return linear(f"{name}.o_proj", np.einsum("hqk,khd->qhd", chances, v).reshape(time, -1))

    def mlp(name, x):
        gate = linear(f"{name}.gate_proj", x)
        return linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * linear(f"{name}.up_proj", x))

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        x = x + attention(f"{name}.self_attn", normalized(f"{name}.input_layernorm", x))
        x = x + mlp(f"{name}.mlp", normalized(f"{name}.post_attention_layernorm", x))
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return normalized("model.norm", x) @ weights[f"{head}.weight"].T
