"""Arguments of `generate` and decoders, and those refused before anything is computed."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rqjax.nn import generate, load_decoder

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
KEY = jax.random.key(7)
PROMPT = np.arange(3, 13)


@pytest.fixture(scope="module")
def decoder():
    return load_decoder(CHECKPOINTS / "llama")


def caches(decoder, batch=1, max_len=64, name="float32", **options):
    return decoder.caches(name, KEY, batch, max_len, window=16, sinks=4, **options)


def made(decoder, prompt, count=4, **options):
    tokens = generate(decoder, caches(decoder), prompt, **{"key": KEY, "temperature": 0, "chunk": 16, **options})
    return [next(tokens)[0] for _ in range(count)]


class Tensor:
    """An array of another library, with only the methods that are needed."""

    def __init__(self, array):
        self.array = np.asarray(array)

    def __array__(self, *args, **options):
        return self.array

    def __index__(self):
        return int(self.array)


@pytest.mark.full
def test_one_prompt_in_any_form(decoder):
    """The likeliest tokens by logits without caches; sampling with no nucleus to speak of takes them, too."""
    expected, text = [], [*PROMPT]
    for _ in range(4):
        expected.append(int(decoder(np.array([text + expected]))[0][0, -1].argmax()))
    forms = [PROMPT, PROMPT[None], PROMPT.tolist(), [PROMPT.tolist()], jnp.asarray(PROMPT[None]), range(3, 13)]
    for form in [*forms, Tensor(PROMPT), Tensor(PROMPT[None]), [*map(Tensor, PROMPT)]]:
        assert made(decoder, form) == expected
    for options in ({"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1}):
        assert made(decoder, PROMPT, temperature=np.float32(1), **options) == expected
    assert made(decoder, PROMPT, key=jax.random.PRNGKey(3)) == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "expected a prompt of at least one token, got none"),
        (np.stack([PROMPT, PROMPT]), {}, r"expected tokens of one text, .* got shape \(2, 10\)"),
        (PROMPT + 0.5, {}, "expected tokens to be whole numbers, got float64"),
        (np.full(20, 96), {}, "expected tokens from 0 to 95, got 96 to 96"),
        ({"input_ids": PROMPT}, {}, "expected tokens to be whole numbers, got dict"),
        (PROMPT, {"top_p": 0}, "expected 1e6 >= temperature >= 0 and 0 < top_p <= 1, got 0 and 0"),
        (PROMPT, {"temperature": np.nan}, "expected 1e6 >= temperature >= 0 .* got nan and 1.0"),
        (PROMPT, {"temperature": None}, "expected 1e6 >= temperature >= 0 .* got None and 1.0"),
        (PROMPT, {"top_k": -1}, "expected top_k to be a whole number from 0 to 16777216, got -1"),
        (PROMPT, {"min_p": -0.1}, "expected 0 <= min_p <= 1, got -0.1"),
        (PROMPT, {"chunk": 0}, "expected chunk to be a whole number from 1 to 1048576, got 0"),
        (PROMPT, {"key": jax.random.split(KEY)}, "expected one key of jax.random.key, got"),
        (PROMPT, {"key": jnp.zeros(3)}, "expected one key of jax.random.key, got"),
        (np.full(65, 3), {}, "no room in the caches: 64 tokens are held"),
    ],
)
def test_what_generate_refuses(decoder, prompt, options, message):
    """Arguments are refused when `generate` is called, not when the first token is asked for."""
    with pytest.raises(ValueError, match=message) as raised:
        generate(decoder, caches(decoder), prompt, **{"key": KEY, "temperature": 0, **options})
    assert "\n" not in str(raised.value)


def test_caches_that_are_not_the_decoders(decoder):
    other = load_decoder(CHECKPOINTS / "qwen2")
    latent = load_decoder(CHECKPOINTS / "deepseek_v2")
    turned = caches(decoder, name="eden_2+pre_rope")
    wrong = {
        "expected 2 caches, one a layer, got 0": (),
        "expected 2 caches, one a layer, got 1": caches(decoder)[:1],
        "expected caches of 1 sequences, as the tokens, got 2": caches(decoder, 2),
        "expected caches of 2 heads of 32, got 1 of 32": caches(other),
        "expected caches of 2 heads of 32, got 1 of 40": caches(latent),
        "expected caches with .*500000.* in layer 0, got .*10000": _with_rope(
            turned, caches(other, name="eden_2+turned")
        ),
        "expected caches without pages": caches(decoder, pages=2),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            generate(decoder, given, PROMPT, key=KEY)
        if "pages" not in message:
            with pytest.raises(ValueError, match=message):
                decoder(PROMPT[None], given)


def _with_rope(mine, others):
    forms = [dataclasses.replace(a.key_form, rope=b.key_form.rope) for a, b in zip(mine, others, strict=True)]
    return tuple(dataclasses.replace(a, key_form=form) for a, form in zip(mine, forms, strict=True))


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (PROMPT, {}, r"expected tokens \(batch, time\), got shape \(10,\)"),
        (PROMPT[None] + 0.5, {}, "expected tokens to be whole numbers, got float64"),
        (jnp.ones((1, 2), bool), {}, "expected tokens to be whole numbers, got bool"),
        (np.array([[1, 96]]), {"caches": 1}, r"expected tokens from 0 to 95, got \[\[1, 96\]\]"),
        (np.array([[1, 2**33]]), {"caches": 1}, "expected tokens from 0 to 95"),
        (jnp.array([[-1, 5]]), {"caches": 1}, r"expected tokens from 0 to 95, got \[\[-1, 5\]\]"),
        (PROMPT[None], {"caches": 2}, "expected caches of 1 sequences, as the tokens, got 2"),
        (PROMPT[None], {"caches": 1, "valid": np.array([1.0])}, "expected valid to be whole numbers, got float64"),
        (PROMPT[None], {"caches": 1, "valid": np.array([11])}, r"expected valid from 0 to 10, got \[11\]"),
        (PROMPT[None], {"caches": 1, "valid": np.array([1, 2])}, r"expected valid .* of shape \(1,\), got \(2,\)"),
        (PROMPT[None], {"caches": 1, "slots": np.array([0])}, "slots are of a cache with pages"),
        (PROMPT[None], {"slots": np.array([0])}, "slots need caches"),
        (PROMPT[None], {"newest": 0}, "expected newest to be a whole number from 1 to 10, got 0"),
        (PROMPT[None], {"newest": 11}, "expected newest to be a whole number from 1 to 10, got 11"),
    ],
)
def test_what_decoders_refuse(decoder, tokens, options, message):
    if "caches" in options:
        options = {**options, "caches": caches(decoder, options["caches"])}
    with pytest.raises(ValueError, match=message):
        decoder(tokens, **options)


@pytest.mark.full
def test_logits_of_tokens_outside_the_vocabulary_are_nan(decoder):
    """Tokens outside the vocabulary make logits NaN under jit and without caches; padding may be any number."""
    for call in (decoder, jax.jit(lambda tokens: decoder(tokens))):
        logits = call(np.array([[5, 96, 7], [-1, 5, 6], [5, 6, 7]]))[0]
        np.testing.assert_array_equal(jnp.isnan(logits).all((1, 2)), [1, 1, 0])
        assert jnp.isfinite(logits[2]).all()
    found = [decoder(np.array([[pad, pad, 5, 6]]), caches(decoder), valid=np.array([2]))[0] for pad in (0, -100)]
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0][:, 2:], decoder(np.array([[5, 6]]))[0], atol=1e-5)
