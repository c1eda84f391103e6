"""Decoders against the logits of Hugging Face's classes; see tests/checkpoints/make.py."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rqjax
from rqjax.nn import Decoder, DecoderConfig, exact_attention, families, load_decoder
from tests.tools.suites import some

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
FAMILIES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))
FORWARD = jax.jit(lambda model, tokens: model(tokens)[0])
STEP = jax.jit(lambda model, tokens, caches, valid=None: model(tokens, caches, valid=valid), donate_argnums=2)


CORE = ["gemma3_text", "glm4", "gpt_oss", "deepseek_v3"]
CACHED = [*CORE, "deepseek_v2", "gemma2", "granite", "llama", "phi3_longrope", "qwen3", "smollm3"]
"""Families whose attention differs: windows, soft limits, scales, norms, kinds of ropes, sinks, latents."""


def checkpoint(family):
    expected = np.load(CHECKPOINTS / family / "logits.npz")
    return load_decoder(CHECKPOINTS / family), expected["tokens"], expected["logits"]


def through_caches(model, tokens, name, parts, **options):
    """Logits of all tokens: those up to each of `parts` at once."""
    caches = model.caches(name, jax.random.key(0), len(tokens), 64, dtype=jnp.float32, **options)
    out = []
    for part in np.split(tokens, parts, axis=1):
        logits, caches = STEP(model, part, caches)
        out.append(logits)
    return np.concatenate(out, axis=1)


@pytest.mark.parametrize("family", some(FAMILIES, CORE))
def test_logits_are_those_of_transformers(family):
    model, tokens, expected = checkpoint(family)
    np.testing.assert_allclose(FORWARD(model, tokens), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", some(CACHED, CORE[:1]))
def test_logits_through_the_float_cache(family):
    model, tokens, expected = checkpoint(family)
    logits = through_caches(model, tokens, "float32", range(18, 48), window=4, sinks=1)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits, FORWARD(model, tokens), atol=1e-5, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma3_text", "glm4", "gpt_oss", "deepseek_v2", "llama", "qwen3_moe"])
def test_logits_through_eight_bits(family):
    """Root mean square of the error; the logits' own is 1. A token sees all before it but four in codes.

    Six rotations give mistral 0.0096 to 0.0113. Of mixtures the median over tokens: a router may choose another expert
    for one, whose keys others see.
    """
    model, tokens, expected = checkpoint(family)
    logits = through_caches(model, tokens, "turboquant_8", range(6, 48), window=0, sinks=4)
    middle = np.median if model.config.num_experts else np.mean
    assert 1e-4 < np.sqrt(middle(np.mean((logits - expected) ** 2, axis=-1))) < 1.2e-2


@pytest.mark.parametrize("name", some(["turboquant_8+turned", "turboquant_8+pre_rope"], []))
def test_layers_without_positions(name):
    """Codes that know positions take them for layers whose positions turn nothing."""
    expected = np.load(CHECKPOINTS / "smollm3" / "logits.npz")
    model = load_decoder(CHECKPOINTS / "smollm3")
    assert [rope.kind for rope in model.config.ropes] == ["default", "none"]
    logits = through_caches(model, expected["tokens"], name, range(6, 48), window=0, sinks=4)
    assert 1e-4 < np.sqrt(np.mean((logits - expected["logits"]) ** 2)) < 1.2e-2


def test_texts_of_the_original_length():
    """Short frequencies of a longrope are used if nothing longer is to come; transformers changes them underway."""
    folder = CHECKPOINTS / "phi3_longrope"
    expected = np.load(folder / "logits.npz")
    model = load_decoder(folder, context=32)
    np.testing.assert_allclose(FORWARD(model, expected["tokens"][:, :32]), expected["short"], atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="expected context to be a whole number from 1 to 128, got 129"):
        load_decoder(folder, context=129)


@pytest.mark.parametrize("family", some(["llama", "mixtral", "gpt_oss", "deepseek_v3"], ["llama"]))
def test_ragged_prompts(family):
    """Prompts of different lengths, padded on the left, get the logits that each gets alone."""
    expected = np.load(CHECKPOINTS / family / "logits.npz")
    model, tokens = load_decoder(CHECKPOINTS / family), expected["tokens"][:, :30]
    padded = tokens.copy()
    padded[1] = np.concatenate([np.zeros(9, np.int32), tokens[1, :21]])
    caches = model.caches("float32", jax.random.key(0), 2, 64, window=4, sinks=0, dtype=jnp.float32)
    logits, caches = STEP(model, padded, caches, np.array([30, 21]))
    np.testing.assert_allclose(logits[0], expected["logits"][0, :30], atol=1e-4)
    np.testing.assert_allclose(logits[1, 9:], expected["logits"][1, :21], atol=1e-4)
    logits, caches = STEP(model, expected["tokens"][[0, 1], [30, 21]][:, None], caches)
    np.testing.assert_allclose(logits[:, 0], expected["logits"][[0, 1], [30, 21]], atol=1e-4)
    assert [cache.lengths.tolist() for cache in caches] == [[31, 22]] * len(caches)


@pytest.mark.full
def test_newest_logits_and_boundary_layers():
    model = Decoder(DecoderConfig.parse(fields(num_hidden_layers=4)), rngs=nnx.Rngs(0))
    caches = model.caches("v3_4", jax.random.key(0), 1, 256, boundary=1)
    assert [isinstance(cache.key_quantizer, rqjax.Exact) for cache in caches] == [True, False, False, True]
    assert not np.array_equal(*(jax.tree.leaves(cache.key_quantizer)[0] for cache in caches[1:3]))
    tokens = np.arange(20)[None]
    logits, _ = jax.jit(lambda model, tokens: model(tokens, newest=2))(model, tokens)
    np.testing.assert_allclose(logits, FORWARD(model, tokens)[:, -2:], rtol=1e-5)


def test_narrow_weights_are_widened_one_at_a_time():
    """Four layers of 8.4 M weights in bfloat16: float32 copies of all would take 134 MB, the largest one takes 8."""
    config = fields(hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, tie_word_embeddings=True)
    model = nnx.eval_shape(lambda: Decoder(DecoderConfig.parse(config), rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    compiled = jax.jit(lambda model, tokens: model(tokens)[0]).lower(model, tokens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 20e6


@pytest.mark.full
def test_a_sequence_of_nan_spoils_itself_alone():
    """NaN at the first coordinate of the first sequence, in a decoder on narrow weights."""
    model = Decoder(DecoderConfig.parse(fields()), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    weight = model.embed_tokens.weight
    weight.value = weight[...].at[3, 0].set(jnp.nan)
    spoiled, clean = (FORWARD(model, np.array([[first, 1], [1, 2]])) for first in (3, 4))
    assert jnp.isnan(spoiled[0]).all()
    np.testing.assert_array_equal(spoiled[1], clean[1])
    assert jnp.isfinite(clean).all()


def test_calls_that_do_not_fit():
    model = Decoder(DecoderConfig.parse(fields()), rngs=nnx.Rngs(0))
    caches = model.caches("v3_4", jax.random.key(0), 1, 64)
    with pytest.raises(ValueError, match="expected 1 caches, one a layer, got 2"):
        model(np.zeros((1, 3), int), caches * 2)
    with pytest.raises(ValueError, match="expected 1 strategies, one a layer, got 2"):
        model.caches([rqjax.strategy("v3_4", jax.random.key(0), 16)] * 2, jax.random.key(0), 1, 64)
    with pytest.raises(ValueError, match="valid needs caches"):
        model(np.zeros((1, 3), int), valid=np.array([2]))


@pytest.mark.parametrize(
    ("time", "window", "softcap"), some([(300, None, None), (300, 40, 5.0), (2100, 150, None)], [(300, 40, 5.0)])
)
def test_exact_attention_in_blocks(time, window, softcap):
    q = jax.random.normal(jax.random.key(0), (1, time, 4, 8))
    k, v = (jax.random.normal(jax.random.key(i), (1, time, 2, 8)) for i in (1, 2))
    attention = functools.partial(exact_attention, scale=0.7, sliding_window=window, softcap=softcap)
    out = np.asarray(jax.jit(attention)(q, k, v))
    scores = 0.7 * np.einsum("thd,shd->hts", q[0], np.repeat(k[0], 2, axis=1))
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    age = np.arange(time)[:, None] - np.arange(time)
    scores = np.where((age >= 0) & (age < (window or time)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[0], np.einsum("hts,shd->thd", weights, np.repeat(v[0], 2, axis=1)), atol=1e-5)


def fields(**changes):
    """Fields of a config.json for a model of one layer."""
    return {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "head_dim": 32,
        **changes,
    }


def test_fields_of_transformers_4():
    """Configs in the older form hold the same facts, and classes fill in the rest."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = DecoderConfig.parse(fields(rope_theta=5e5, rope_scaling=llama3))
    assert old == DecoderConfig.parse(fields(rope_parameters={"rope_theta": 5e5, **llama3}))
    gemma = {**fields(num_hidden_layers=7), "model_type": "gemma3_text"}
    parsed = DecoderConfig.parse({**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert parsed.windows == (4096,) * 5 + (None, 4096)
    assert [rope.theta for rope in parsed.ropes[4:6]] == [1e4, 1e6]
    assert [rope.factors for rope in parsed.ropes[4:6]] == [(), (8.0,)]
    assert DecoderConfig.parse({"model_type": "gemma3", "text_config": gemma}) == DecoderConfig.parse(gemma)
    outer = {"model_type": "gemma3", "text_config": {**gemma, "final_logit_softcapping": 30.0, "eos_token_id": 1}}
    parsed = DecoderConfig.parse({**outer, "tie_word_embeddings": False, "eos_token_id": [1, 106]})
    assert (parsed.logit_softcap, parsed.tie_word_embeddings, parsed.eos_token_ids) == (None, False, (1, 106))
    assert DecoderConfig.parse({**outer, "eos_token_id": None}).eos_token_ids == (1,)
    mistral = fields(model_type="mistral")
    assert DecoderConfig.parse(mistral).windows == (4096,)
    assert DecoderConfig.parse({**mistral, "sliding_window": None}).windows == (None,)
    qwen = fields(model_type="qwen2", num_hidden_layers=3, sliding_window=64, max_window_layers=1)
    assert DecoderConfig.parse(qwen).windows == (None, None, None)
    assert DecoderConfig.parse({**qwen, "use_sliding_window": True}).windows == (None, 64, 64)
    assert DecoderConfig.parse(fields(head_dim=None)).head_dim == 4


EXPERTS = {"num_local_experts": 4, "sliding_window": 8}


def test_which_layers_have_experts():
    config = fields(model_type="qwen3_moe", num_hidden_layers=4, num_experts=3, num_experts_per_tok=1)
    config = DecoderConfig.parse(
        {**config, "moe_intermediate_size": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    )
    assert config.mixtures == (False, False, False, True)
    assert (config.num_experts, config.moe_intermediate_size, config.intermediate_size) == (3, 8, 16)
    assert not config.norm_topk_prob
    mixtral = DecoderConfig.parse(fields(model_type="mixtral", **EXPERTS, num_experts_per_tok=2))
    assert (mixtral.windows, mixtral.mixtures, mixtral.norm_topk_prob) == ((8,), (True,), True)


def test_activations():
    """Activations equal their formulas; `gelu_new` and others are by tanh."""
    x = np.linspace(-3, 3, 13)
    erf, tanh = np.vectorize(math.erf), np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))
    expected = dict.fromkeys(("silu", "swish"), x / (1 + np.exp(-x))) | {"gelu": x * (1 + erf(x / 2**0.5)) / 2}
    expected |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), x * (1 + tanh) / 2)
    expected |= {"relu": np.maximum(x, 0)}
    assert expected.keys() == families.ACTIVATIONS.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(families.ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), values, atol=1e-6)


def test_nearest_families_are_supported():
    assert {nearest for nearest, _ in families.MISSING.values()} <= families.FAMILIES.keys()
    assert not families.MISSING.keys() & families.FAMILIES.keys()


LATENT = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "unknown architecture .* 't5'; known: deepseek_v2, deepseek_v3, gemma2, .* gpt_oss"),
        (
            {"model_type": "qwen2_moe"},
            "unsupported .* 'qwen2_moe': the nearest one is 'qwen3_moe'; missing: a gate",
        ),
        ({"model_type": "mixtral", "num_local_experts": None}, "config.json has no 'num_local_experts'"),
        (
            {"model_type": "mixtral", **EXPERTS, "num_experts_per_tok": 5},
            "num_experts_per_tok to be .* from 1 to 4, got 5",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantized weights are not supported, but gpt_oss's"),
        ({"model_type": "qwen"}, "did you mean 'qwen"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"hidden_size": "16"}, "expected hidden_size to be a whole number from 1 to .*, got '16'"),
        ({"num_key_value_heads": 3}, "expected num_attention_heads to be a multiple of 3, got 4"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "'dynamic' in config.json .its frequencies depend on",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "config.json has no 'factor' for its rope_type 'linear'"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 2}, "expected layer_types of 1"),
        (
            {"model_type": "qwen2", "layer_types": "full"},
            "expected layer_types to be a list in config.json, got 'full'",
        ),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"]}, "expected use_sliding_window and a sliding_w"),
        ({"hidden_act": "xielu"}, "unknown activation .hidden_act of config.json. 'xielu'; .*known: gelu, .* silu"),
        ({"is_causal": False}, "expected causal attention, got is_causal false or use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "expected causal attention, got"),
        ({"per_layer_config": {"0": {}}}, "expected layers of one size, got a per_layer_config"),
        ({"attention_bias": None}, "config.json has no 'attention_bias'"),
        ({"attention_bias": 1}, "expected attention_bias to be true or false in config.json, got 1"),
        ({"rms_norm_eps": "1e-5"}, "expected rms_norm_eps to be a positive number, got '1e-5'"),
        ({"rope_theta": "500000"}, "expected rope_theta to be a positive number, got '500000'"),
        ({"rope_scaling": [1]}, r"expected rope_scaling to be an object in config.json, got \[1\]"),
        ({"rope_scaling": {"type": None}}, "unsupported rope_type None in config.json"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear' .*; supported: default, su",
        ),
        ({"rope_scaling": {"type": "none"}}, "unsupported rope_type 'none' in config.json"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "expected factor to be a positive number, got '4'"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [], "short_factor": 3.0}},
            "expected short_factor to be a list of numbers, got 3.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "expected rope_parameters of all layers alike in config.json, got some of 'full_attention'",
        ),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "expected no partial_rotary_factor beside a rope_type 'linear', got 0.5",
        ),
        (
            {"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "gptq"}},
            "quantized weights are not supported",
        ),
        (
            {"model_type": "gemma3", "text_config": [1]},
            r"expected text_config to be an object in config.json, got \[1\]",
        ),
        ({"quantization_config": {}}, "quantized weights are not supported"),
        ({"model_type": "gemma3"}, "config.json has no 'text_config'"),
        ({"model_type": "deepseek_v3", **LATENT, "rope_interleave": False}, "expected rope_interleave true"),
        ({"model_type": "deepseek_v3", **LATENT, "kv_lora_rank": 0}, "expected kv_lora_rank to be .* from 1"),
        ({"model_type": "deepseek_v3", **LATENT, "n_group": 3}, "expected a multiple of n_group 3 experts, .*, got 8"),
        ({"model_type": "deepseek_v3", **LATENT, "n_group": 8}, "expected .* 8 experts, 2 or more a group, got 8"),
        (
            {"model_type": "deepseek_v2", **LATENT, "topk_method": "best"},
            "expected topk_method greedy or .*, got 'best'",
        ),
    ],
)
def test_configs_that_are_refused(changes, message):
    with pytest.raises((ValueError, KeyError), match=message):
        DecoderConfig.parse(fields(**changes))
