"""Caches of decoders that know rotary positions, and quantizers fitted to a decoder's own keys and values."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rqjax
from rqjax.nn import Decoder, DecoderConfig, load_calibration, load_decoder, save_calibration
from rqjax.nn.calibration import through

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
STEP = jax.jit(lambda model, tokens, caches, valid=None: model(tokens, caches, valid=valid))
KEY = jax.random.key(0)


def checkpoint(family):
    logits = np.load(CHECKPOINTS / family / "logits.npz")
    return load_decoder(CHECKPOINTS / family), logits["tokens"], logits["logits"]


def error(model, tokens, expected, strategies, parts=range(6, 48), **options):
    """Root mean square; the logits' own is 1. Of mixtures the median over tokens: routers may choose other experts."""
    caches, out = model.caches(strategies, KEY, len(tokens), 64, dtype=jnp.float32, **options), []
    for part in np.split(tokens, list(parts), axis=1):
        logits, caches = STEP(model, part, caches)
        out.append(logits)
    middle = np.median if model.config.num_experts else np.mean
    return np.sqrt(middle(np.mean((np.concatenate(out, axis=1) - expected) ** 2, axis=-1)))


FAMILIES = ("llama", "qwen2", "gemma3_text", "glm4", "deepseek_v3")
NAMES = ("turboquant_8+turned", "turboquant_8+pre_rope")


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "name"), [("llama", NAMES[0]), *((family, NAMES[i % 2]) for i, family in enumerate(FAMILIES, 1))]
)
def test_eight_bits_give_the_logits_of_transformers(family, name):
    """A token sees all before it but four in codes."""
    assert 1e-4 < error(*checkpoint(family), name, window=0, sinks=4) < 2e-2


@pytest.mark.full
def test_ragged_prompts_through_turned_caches():
    model, tokens, _ = checkpoint("llama")
    padded = np.concatenate([np.zeros((1, 9), np.int32), tokens[1:, :21]], axis=1)
    both = np.concatenate([tokens[:1, :30], padded])
    options = {"window": 4, "sinks": 0, "dtype": jnp.float32}
    together, _ = STEP(model, both, model.caches("eden_3+turned", KEY, 2, 64, **options), np.array([30, 21]))
    alone, _ = STEP(model, tokens[1:, :21], model.caches("eden_3+turned", KEY, 1, 64, **options))
    np.testing.assert_allclose(together[1, 9:], alone[0], atol=1e-4)


@pytest.mark.full
def test_calibrated_on_its_own_text(tmp_path):
    """Quantizers fitted to these very tokens lose less than random ones; they are kept beside the checkpoint."""
    model, tokens, expected = checkpoint("llama")
    options = {"window": 0, "sinks": 0}
    found = {name: model.calibrate(tokens, name, KEY) for name in ("klt_trellis_2+pre_rope", "klt_trellis_2/eden_2")}
    errors = {name: error(model, tokens, expected, strategies, **options) for name, strategies in found.items()}
    assert max(errors.values()) < error(model, tokens, expected, "eden_2", **options)
    for name, strategies in found.items():
        save_calibration(strategies, model, tmp_path, name)
    assert sorted(path.name for path in tmp_path.glob("rqjax/*")) == [
        "klt_trellis_2+pre_rope.safetensors",
        "klt_trellis_2_over_eden_2.safetensors",
    ]
    narrow = load_decoder(CHECKPOINTS / "llama", dtype=jnp.bfloat16)
    again = load_calibration(narrow, tmp_path, "klt_trellis_2+pre_rope")
    assert error(model, tokens, expected, again, **options) == errors["klt_trellis_2+pre_rope"]


def test_a_calibration_knows_its_checkpoint(tmp_path):
    model, tokens, _ = checkpoint("llama")
    path = save_calibration(model.calibrate(tokens, "eden_2+turned", KEY), model, tmp_path, "eden_2+turned")
    forms = [strategy.key_form for strategy in load_calibration(model, tmp_path, "eden_2+turned")]
    assert all(isinstance(form, rqjax.TurnedMean) and not form.learned and form.mean is not None for form in forms)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*rqjax/eden_3\.safetensors"):
        load_calibration(model, tmp_path, "eden_3")
    with pytest.raises(ValueError, match=r"eden_2\+turned\.safetensors was fitted to another checkpoint"):
        load_calibration(load_decoder(CHECKPOINTS / "qwen3"), tmp_path, "eden_2+turned")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_calibration(model, tmp_path, "eden_2+turned")


@pytest.mark.full
def test_fitting_more_layers_compiles_nothing_more(caplog):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields = {"model_type": "llama", "vocab_size": 32, "head_dim": 32, **sizes}

    def compiled(layers):
        model = Decoder(DecoderConfig.parse({**fields, "num_hidden_layers": layers}), rngs=nnx.Rngs(0))
        caplog.clear()
        with jax.log_compiles():
            model.calibrate(np.arange(128).reshape(2, 64) % 32, "klt_trellis_2+pre_rope", KEY)
        return [record.message for record in caplog.records if record.message.startswith("Compiling")]

    assert compiled(2)
    assert compiled(4) == []


def test_calibrate_rejects_invalid_arguments():
    model, tokens, _ = checkpoint("llama")
    with pytest.raises(ValueError, match=r"expected at least \d+ tokens \(n, time\)"):
        model.calibrate(tokens[:1, :3], "klt_trellis_2", KEY)
    with pytest.raises(ValueError, match=r"expected tokens to be whole numbers below \d+, got int32"):
        model.calibrate(np.full((2, 100), 10**6), "eden_2", KEY)
    with pytest.raises(rqjax.UnknownName, match="klt_trellis"):
        model.calibrate(tokens, "klt_treliss_2", KEY)
    with pytest.raises(ValueError, match=r"expected a rope for keys in the form TurnedMean\(learned\), got none"):
        rqjax.strategy("eden_2+turned", KEY, 64).cache(1, 1, 64)
    model.embed_tokens.weight.value = model.embed_tokens.weight[...] * jnp.nan
    with pytest.raises(ValueError, match="keys of layer 0: "):
        model.calibrate(tokens, "klt_trellis_2", KEY)


@pytest.mark.full
def test_layers_with_experts_and_sinks():
    """One after the other, as calibration takes them."""
    decoder = load_decoder(CHECKPOINTS / "gpt_oss")
    tokens = jnp.arange(80).reshape(2, 40)
    x = decoder.embedded(tokens)
    for layer in range(len(decoder.layers)):
        x, samples, _ = through(decoder, layer, x, rqjax.AsGiven())
        assert samples["keys"].shape == (2, 80, 32)
    np.testing.assert_allclose(decoder.logits(decoder.norm(x)), decoder(tokens)[0], atol=1e-5)
