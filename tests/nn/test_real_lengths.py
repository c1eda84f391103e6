"""Prompts as long as people's, at the default window and sinks, against the logits of transformers."""

from pathlib import Path

import jax
import numpy as np
import pytest

from rqjax.nn import Engine, generate, load_decoder
from tests.tools import plain_decoder
from tests.tools.suites import some

ROOT = Path(__file__).parents[2]
CHECKPOINTS = ROOT / "tests" / "checkpoints"
KEY = jax.random.key(0)
EVERY = 50
"""Distance between tokens whose logits are in `long.npz`."""
FORWARD = jax.jit(lambda model, tokens: model(tokens)[0])
STEP = jax.jit(lambda model, tokens, caches: model(tokens, caches), donate_argnums=2)


@pytest.fixture(scope="module", params=some(["llama", "gpt_oss", "gemma3_text"], ["gemma3_text"]))
def checkpoint(request):
    """A decoder, a text of 700 tokens or of 3,000, its logits as far as they are known."""
    folder = CHECKPOINTS / request.param
    expected = np.load(folder / "long.npz")
    return load_decoder(folder), expected["tokens"], expected["logits"]


def logits_in_pieces(model, tokens, size):
    caches = model.caches("float32", KEY, 1, 1024 * -(-tokens.shape[1] // 1024))
    assert {(cache.sinks, cache.exact_keys.dtype.name) for cache in caches} == {(4, "float32")}
    assert [cache.sliding_window for cache in caches] == [*model.config.windows]
    assert {cache.window for cache in caches if cache.capacity} == {128}
    parts = []
    for part in np.split(tokens, range(size, tokens.shape[1], size), axis=1):
        logits, caches = STEP(model, part, caches)
        parts.append(logits)
    return np.concatenate(parts, axis=1)


def test_without_caches(checkpoint):
    model, tokens, expected = checkpoint
    np.testing.assert_allclose(FORWARD(model, tokens)[:, EVERY - 1 :: EVERY], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", some([129, 300, 3000], []))
def test_pieces(checkpoint, size):
    model, tokens, expected = checkpoint
    logits = logits_in_pieces(model, tokens, size)
    np.testing.assert_allclose(logits[:, EVERY - 1 :: EVERY], expected, atol=1e-4, rtol=0)


@pytest.mark.full
def test_a_piece_then_token_by_token(checkpoint):
    model, tokens, expected = checkpoint
    caches = model.caches("float32", KEY, 1, 1024)
    logits, caches = STEP(model, tokens[:, :300], caches)
    for token in range(300, 350):
        logits, caches = STEP(model, tokens[:, token : token + 1], caches)
    np.testing.assert_allclose(logits[:, -1], expected[:, 349 // EVERY], atol=1e-4, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize("length", [300, 700])
def test_generate_and_engine(checkpoint, length):
    """The likeliest tokens after a prompt; the first by the logits of transformers."""
    model, tokens, expected = checkpoint
    text = tokens[0, :length].tolist()
    for _ in range(4):
        logits = FORWARD(model, np.pad([text], ((0, 0), (0, 704 - len(text)))))
        text.append(int(logits[0, len(text) - 1].argmax()))
    made = text[length:]
    assert made[0] == expected[0, length // EVERY - 1].argmax()
    caches = model.caches("float32", KEY, 1, 1024)
    found = generate(model, caches, text[:length], key=KEY, temperature=0)
    assert [next(found)[0] for _ in made] == made
    engine = Engine(model, "float32", KEY, pages=16, slots=2, max_len=1024)
    ids = [engine.submit(text[:length], max_tokens=4, temperature=0) for _ in range(2)]
    assert engine.run() == dict.fromkeys(ids, made)


@pytest.mark.parametrize("name", some(["llama-d128", "qwen2-d64"], ["qwen2-d64"]))
def test_a_trained_decoder_on_a_real_text(name):
    """Logits of up to 15, of 700 bytes of a program, in one call, against NumPy in float64."""
    folder = ROOT / "results" / "models" / name
    tokens = np.frombuffer((ROOT / "rqjax" / "cache" / "attention.py").read_bytes()[:700], np.uint8).astype(np.int32)
    expected = plain_decoder.logits(folder, tokens)
    model = load_decoder(folder, dtype="float32")
    logits, _ = STEP(model, tokens[None], model.caches("float32", KEY, 1, 1024))
    np.testing.assert_allclose(logits[0], expected, atol=5e-4, rtol=0)
