"""Meaning of a `config.json` to transformers' classes: the table that `tests/checkpoints/make.py configs` writes."""

import json
from pathlib import Path

import numpy as np
import pytest

from rqjax.nn import DecoderConfig

TABLE = json.loads((Path(__file__).parents[1] / "checkpoints" / "configs.json").read_text())
SOME = (0, 1, 2, 3, 4, 5, 27, 28)
"""Layers whose facts the table has."""
LENIENT = {"num_key_value_heads", "head_dim", "norm_topk_prob"}
"""Fields that may be null in all families here."""


def facts(config):
    """Returns those facts of a parsed config that the table has."""
    layers, latent, ropes = config.num_hidden_layers, config.kv_lora_rank > 0, {}
    for window, rope in zip(config.windows, config.ropes, strict=True):
        if rope.kind != "none":
            frequencies = rope.frequencies(config.head_dim)
            ropes.setdefault(window, [*frequencies[[1, len(frequencies) // 2, -1]].tolist(), rope.length])
    found = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    found |= {name: getattr(config, name) for name in ("num_attention_heads", "activation", "rms_norm_eps")}
    turning = config.ropes[0].turning(config.head_dim)
    return found | {
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.qk_nope_head_dim + turning if latent else config.head_dim,
        "num_hidden_layers": layers,
        "windows": [config.windows[i] for i in SOME if i < layers],
        "ropes": list(ropes.values()),
        "turns": [config.ropes[i].kind != "none" for i in SOME if i < layers],
        "tie_word_embeddings": config.tie_word_embeddings,
        "biases": [config.qkv_bias, config.out_bias, config.mlp_bias],
        "scale": config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
        "softcaps": [config.attention_softcap, config.logit_softcap],
        "experts": [config.num_experts, config.num_experts_per_tok],
        "sparse": [config.mixtures[i] for i in SOME if i < layers and config.mixtures],
        "shared": config.n_shared_experts * config.moe_intermediate_size,
        "routed_scaling_factor": config.routed_scaling_factor,
        "groups": list(config.groups),
        "norm_topk_prob": config.norm_topk_prob,
    }


def equal(found, expected):
    if not isinstance(expected, list | float):
        return found == expected
    try:
        return np.allclose(np.float64(found), np.float64(expected), rtol=2e-6, atol=0, equal_nan=True)
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize("family", TABLE)
def test_fields_mean_what_they_mean_to_transformers(family):
    """Left out, null, beside or within others; what its class refuses is refused."""
    (start, usual), *others = TABLE[family]
    wrong = []
    for change, differs in [({}, {}), *others]:
        if family == "gpt_oss" and "hidden_act" in change:
            continue  # its class has the field and does not use it
        try:
            found = facts(DecoderConfig.parse({**start, **change}))
        except ValueError as error:
            nested = "expected rope_parameters of all layers alike" in str(error)
            if differs is not None and not nested:
                wrong.append((change, str(error)))
            continue
        if differs is None:
            if not set(change) <= LENIENT:
                wrong.append((change, "is not refused"))
            continue
        expected = {**usual, **differs}
        wrong += [(change, n, found[n], fact) for n, fact in expected.items() if not equal(found[n], fact)]
    assert not wrong
