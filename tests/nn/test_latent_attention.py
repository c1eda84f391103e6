"""Latent attention with its projections absorbed, against heads of keys and values; its caches, fitted and served."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rqjax
from rqjax.nn import (
    Decoder,
    DecoderConfig,
    Engine,
    advise,
    compat,
    generate,
    load_calibration,
    load_decoder,
    save_calibration,
)
from rqjax.nn.attention import exact_attention

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
KEY = jax.random.key(7)
SIZES = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
FIELDS = {
    "model_type": "deepseek_v2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    **SIZES,
}


@functools.cache
def checkpoint(family):
    return load_decoder(CHECKPOINTS / family)


@pytest.mark.full
@pytest.mark.parametrize("rank", [None, 24])
def test_is_attention_of_heads_of_their_own(rank):
    decoder = Decoder(DecoderConfig.parse({**FIELDS, "q_lora_rank": rank}), rngs=nnx.Rngs(0))
    layer, rng = decoder.layers[0].self_attn, np.random.default_rng(0)
    for _, weight in nnx.iter_graph(layer):
        if isinstance(weight, nnx.Param):
            shape = compat.value(weight).shape
            compat.set_value(weight, jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32))
    x, positions = jnp.asarray(rng.normal(size=(2, 40, 32)), jnp.float32), jnp.arange(40)[None].repeat(2, axis=0)
    options = decoder.attention_options(0)

    def attend(q, k, v):
        return exact_attention(*decoder.turned(0, positions, q, k), v, **options)

    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x))) if rank else layer.q_proj(x)
    turning, latent = jnp.split(layer.kv_a_proj_with_mqa(x), [8], axis=-1)
    both = layer.kv_b_proj(layer.kv_a_layernorm(latent)).reshape(2, 40, 4, 22)
    of_keys = jnp.concatenate([jnp.repeat(turning[:, :, None], 4, axis=2), both[..., :12]], axis=-1)
    rope = rqjax.Rope(1e4, share=8 / 20)
    q, k = (rope(part, positions[..., None]) for part in (q.reshape(2, 40, 4, 20), of_keys))
    expected = layer.o_proj(exact_attention(q, k, both[..., 12:], scale=20**-0.5).reshape(2, 40, -1))
    np.testing.assert_allclose(layer(x, attend), expected, atol=1e-5 * float(jnp.abs(expected).max()), rtol=0)


def test_norms_within_attention_have_an_epsilon_of_their_own():
    """Epsilon is 1e-6 in transformers' classes, whatever `rms_norm_eps` is."""
    config = DecoderConfig.parse({**FIELDS, "q_lora_rank": 24, "rms_norm_eps": 0.5})
    layer, x = Decoder(config, rngs=nnx.Rngs(0)).layers[0], jnp.full(32, 1e-3)
    np.testing.assert_allclose(layer.self_attn.kv_a_layernorm(x), 1e-3 / (1e-6 + 1e-6) ** 0.5, rtol=1e-5)
    np.testing.assert_allclose(layer.self_attn.q_a_layernorm(x[:24]), 1e-3 / (1e-6 + 1e-6) ** 0.5, rtol=1e-5)
    np.testing.assert_allclose(layer.input_layernorm(x), 1e-3 / (1e-6 + 0.5) ** 0.5, rtol=1e-5)


@pytest.mark.full
def test_an_engine_makes_the_tokens_of_each_alone():
    """Prompts in pages, two of which begin alike."""
    decoder, options = checkpoint("deepseek_v2"), {"window": 16, "sinks": 4}
    text = np.random.default_rng(0).integers(3, 90, 320)
    prompts = [text[:300], text[:40], np.concatenate([text[:290], text[:7]])]
    strategy = "eden_3/eden_2+turned"
    engine = Engine(decoder, strategy, KEY, pages=8, slots=3, chunk=128, **options)
    ids = [engine.submit(prompt, max_tokens=6) for prompt in prompts]
    made = engine.run()
    for i, prompt in zip(ids, prompts, strict=True):
        caches = decoder.caches(strategy, KEY, 1, 1024, **options)
        tokens = generate(decoder, caches, prompt, key=jax.random.key(0), chunk=128)
        assert made[i] == [token for (token, _), _ in zip(tokens, range(6), strict=False)]


@pytest.mark.full
@pytest.mark.parametrize("name", ["klt_trellis_3+pre_rope", "oscar_4/klt_trellis_2"])
def test_codes_fitted_to_latents_beat_random_ones(name, tmp_path):
    """Fitted codes err less than random ones on the text that they were fitted to."""
    decoder = checkpoint("deepseek_v2")
    text = jnp.asarray(np.random.default_rng(0).integers(3, 90, (16, 128)))
    fitted = decoder.calibrate(text, name, KEY)
    assert all(isinstance(strategy.values, rqjax.LastPart) for strategy in fitted)
    save_calibration(fitted, decoder, tmp_path, name)
    loaded = load_calibration(decoder, tmp_path, name)
    logits, step = {}, jax.jit(lambda decoder, tokens, caches: decoder(tokens, caches))
    for which, strategies in {"exact": "float32", "fitted": fitted, "loaded": loaded, "random": "turboquant_2"}.items():
        caches = decoder.caches(strategies, KEY, 16, 128, window=0, sinks=0)
        for part in jnp.split(text, 8, axis=1):  # tokens of a call see each other in full precision
            logits[which], caches = step(decoder, part, caches)
    np.testing.assert_array_equal(logits["fitted"], logits["loaded"])
    error = {which: float(jnp.median(jnp.abs(x - logits["exact"]))) for which, x in logits.items()}
    assert error["fitted"] < 0.8 * error["random"]


def test_advice_needs_keys_and_values_apart():
    with pytest.raises(ValueError, match="expected a decoder with keys and values apart"):
        advise(checkpoint("deepseek_v2"), np.full((1, 64), 3), KEY, bits=3)
