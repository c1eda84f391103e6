"""Small decoders of four families, and decoders by name: trained here, pretrained, in a folder or GGUF file, or on
Hugging Face."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from experiments.data import text
from experiments.models import fitted, pretrained
from rqjax import Strategy
from rqjax.core import Registry
from rqjax.nn import Decoder, exact_attention, find_checkpoint, load_calibration, load_decoder, load_tokenizer
from rqjax.nn.advise import rates

TRAINED = Path(__file__).parents[2] / "results" / "models"
"""Decoders trained by `configs/language/train_lm.py`, and `recall`, trained by `configs/language/needle_model.py`."""

_COMMON = {"num_hidden_layers": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "max_position_embeddings": 8192}
SHAPES: Registry = Registry(
    "model",
    {
        "llama-d128": {
            **_COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 192,
            "intermediate_size": 448,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 1e5,
        },
        "qwen2-d64": {
            **_COMMON,
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rope_theta": 1e5,
        },
        "gemma3-d256": {
            **_COMMON,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e5,
            "rope_local_base_freq": 1e4,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "deepseek-r128": {
            **_COMMON,
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "rope_theta": 1e5,
            "num_experts_per_tok": 1,
            "n_routed_experts": 1,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 4,
        },
    },
)
"""Fields of the `config.json` of what is trained here; each has four layers. Three have grouped queries, the fourth
latent attention."""

BY_DIM = {fields["head_dim"]: name for name, fields in SHAPES.items() if "head_dim" in fields}


class Model(NamedTuple):
    decoder: Decoder
    tokenizer: Tokenizer


def load(name: str, dtype: Any = "float32") -> Model:
    """A decoder and its tokenizer: of `results/models`, of `pretrained.NAMES`, of a folder or a GGUF file, or of a name
    on Hugging Face.

    Raises:
      ValueError: the tokenizer has more tokens than the decoder.
    """
    path = folder(name)
    tokenizer, decoder = load_tokenizer(path), load_decoder(path, dtype=dtype)
    count, size = tokenizer.get_vocab_size(), decoder.config.vocab_size
    if count > size:
        raise ValueError(f"the tokenizer of {path} does not match: it has {count} tokens, the decoder has {size}")
    return Model(decoder, tokenizer)


def folder(name: str) -> Path:
    """Returns the folder of a decoder, or its GGUF file."""
    if name in pretrained.NAMES:
        return pretrained.folder(name)
    return find_checkpoint(TRAINED / name if (TRAINED / name).is_dir() else name)


def strategies(decoder: Decoder, model: str, name: str) -> str | list[Strategy]:
    """Returns what `Decoder.caches` takes. Strategies that learn come from the file beside a model that
    `experiments.calibrate` made, and "family@budget" from that of `experiments.advise`."""
    family, _, budget = name.partition("@")
    if budget:
        rates(family)
        command = f"python -m experiments.advise --model={model} --family={family} --budget={budget}"
    else:
        fitted.check(name)
        if not fitted.learns(name):
            return name
        command = f"python -m experiments.calibrate --model={model} --strategy={name}"
    try:
        return load_calibration(decoder, folder(model), name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; to make it: {command}") from None


@functools.lru_cache(maxsize=1)
def captured(name: str, corpus: str, tokens: int) -> tuple[Decoder, dict[str, jax.Array]]:
    """Returns a decoder, and `capture` of the first tokens of held-out text."""
    decoder, tokenizer = load(name)
    return decoder, capture(decoder, jnp.asarray(text.windows(text.held_out(corpus, tokenizer), tokens, 1)[0, :-1]))


@functools.lru_cache(maxsize=1)
def calibration(
    name: str, corpus: str, context: int, count: int, part: Callable[[str, Tokenizer], np.ndarray] = text.seen
) -> dict[str, jax.Array]:
    """Returns `capture` of windows of text, one after the other along time; of training text by default."""
    decoder, tokenizer = load(name)
    windows = jnp.asarray(text.windows(part(corpus, tokenizer), context, count)[:, :-1])
    arrays = jax.lax.map(lambda tokens: capture(decoder, tokens), windows)
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}


@jax.jit
def capture(decoder: Decoder, tokens: jax.Array) -> dict[str, jax.Array]:
    """Queries, keys and values (time, heads, head_dim) of each layer for tokens (time,): layers.<i>.<q, k or v>."""
    seen = {}

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k = decoder.turned(layer, jnp.arange(len(tokens))[None], q, k)
        seen.update({f"layers.{layer}.{name}": x[0] for name, x in (("q", q), ("k", k), ("v", v))})
        return exact_attention(q, k, v, **decoder.attention_options(layer))

    decoder.hidden(tokens[None], attend)
    return seen
