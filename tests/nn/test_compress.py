"""Compressed caches under the unmodified samplers of google-tunix and gemma, on small random models.

`make test-engines` makes the environment. Of tunix 0.1.7 and gemma 4.0.1; what differs in others, this finds.
"""

import importlib
import importlib.machinery
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import rqjax
from rqjax.nn import compress

DONATED = pytest.mark.filterwarnings("error:Some donated buffers")

KEY, SIZE, DIM, CACHE, STEPS = jax.random.key(0), 128, 32, 128, 20
OPTIONS = {"window": 8, "sinks": 2}
"""Window small enough that most of a prompt is in codes."""
SAME = dict(embed_dim=SIZE, hidden_dim=64, num_heads=4, head_dim=DIM, num_kv_heads=2)
WINDOW = 24
GEMMA_2 = dict(final_logit_softcap=30.0, attn_logits_soft_cap=5.0, use_post_attn_norm=True, use_post_ffw_norm=True)
GEMMA_3 = dict(sliding_window_size=WINDOW, global_base_frequency=1_000_000, global_scale_factor=8.0)


def with_noise(weights):
    """Weights for which attention is neither flat nor sharp: queries, keys and values have about unit variance."""
    leaves, structure = jax.tree.flatten(weights)
    keys = jax.random.split(KEY, len(leaves))
    leaves = [x + jax.random.normal(k, x.shape) / SIZE**0.5 for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def bound(name, layers):
    """Bound on the relative error of logits. Keys and values of each layer err independently, as the code does."""
    x = jax.random.normal(KEY, (1000, DIM))
    error = jnp.linalg.norm(x - rqjax.roundtrip(rqjax.strategy(name, KEY, DIM).keys, x)) / jnp.linalg.norm(x)
    return max(float(error) * (2 * layers) ** 0.5, 1e-5)


def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


class Bytes:
    """A tokenizer for tunix."""

    def encode(self, text, **_):
        return [3 + ord(letter) % 120 for letter in text]

    def decode(self, tokens, **_):
        return " ".join(str(int(token)) for token in tokens)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def tunix_model(family):
    module = importlib.import_module(f"tunix.models.{family}.model")
    if family.startswith("gemma"):
        kinds = (module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL)
        # tunix 0.1.7 counts padding in Gemma 2's windows, so only a window that is never full gives the same tokens.
        config = dict(num_layers=2, num_embed=SIZE, sliding_window_size=CACHE, attention_types=kinds, **GEMMA_2)
        if family == "gemma3":  # every sixth layer is a global one
            config = dict(num_layers=6, num_embed=SIZE, param_dtype=jnp.float32, **GEMMA_3)
    else:  # as many tokens as dimensions: tunix 0.1.7 has room for no more logits of Llama 3
        config = dict(num_layers=2, vocab_size=SIZE, rope_theta=10_000, norm_eps=1e-5)
    name = {"llama3": "Llama3", "gemma": "Gemma", "gemma3": "Gemma3"}.get(family, family.title())
    graph, state = nnx.split(getattr(module, name)(module.ModelConfig(**SAME, **config), rngs=nnx.Rngs(0)))
    model = nnx.merge(graph, with_noise(state))
    if not hasattr(model, "num_embed"):  # tunix 0.1.7 asks for it where it returns logits; its Qwens have none
        model.num_embed = SIZE
    return model


class Tunix:
    """A sampler of its own for a model."""

    PROMPTS = ("class Queue: def put(self, item): self.items.append(item)", "import re")
    """Prompts, of which the second is padded on the left, by more than its own length."""

    def __init__(self, model):
        from tunix.generate.sampler import CacheConfig, Sampler

        self.sampler = Sampler(model, Bytes(), CacheConfig(CACHE, model.config.num_layers, 2, DIM))

    def __call__(self, prompts=PROMPTS, **options):
        """Returns the tokens of each prompt and of its continuation, without the first, and the logits that predict
        them."""
        out = self.sampler(prompts, STEPS, echo=True, return_logits=True, forbidden_tokens=(0, 2), **options)
        return [np.asarray(x)[1:] for x in out.tokens], [np.asarray(x)[1:] for x in out.logits]


TUNIX = {
    "llama3": ("float32+pre_rope", "v3_4"),
    "qwen2": ("float32+pre_rope", "turboquant_trellis_3+turned"),
    "qwen3": ("float32", "turboquant_trellis_3"),
    "gemma": ("float32", "v3_4"),
    "gemma3": ("float32+pre_rope", "v3_4"),
}
"""Engines have their ropes from three places: an argument's default, the config, the layer."""


@DONATED
@pytest.mark.parametrize("family", TUNIX)
def test_tunix(family):
    """Prompts of two lengths, padded, then tokens one by one, all under tunix's own jit and donation."""
    model = tunix_model(family)
    tokens, logits = Tunix(model)()
    for name in TUNIX[family]:
        found, close = Tunix(compress(model, name, KEY, **OPTIONS))()
        for i in range(2):
            same = int(np.argmax(np.append(tokens[i] != found[i], True)))
            if name.startswith("float32"):
                assert same == len(tokens[i]) > STEPS
            error = relative(close[i][: same + 1], logits[i][: same + 1])
            assert error < bound(name, model.config.num_layers), name
            assert error > 1e-3 or name.startswith("float32"), "codes are not looked at"


def test_tunix_with_beams_and_a_second_request():
    """A search through beams repeats and picks sequences of the cache; a request after another compiles nothing."""
    model = tunix_model("qwen2")
    plain, compressed = Tunix(model), Tunix(compress(model, "float32+turned", KEY, **OPTIONS))
    for prompts in (Tunix.PROMPTS, Tunix.PROMPTS[::-1]):
        expected, found = (sampler(prompts, beam_size=3)[0] for sampler in (plain, compressed))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert compressed.sampler._compiled_decode_fn._cache_size() == 1


def test_the_model_itself_and_calls_without_a_cache_stay_as_they_are():
    model, module = tunix_model("gemma3"), importlib.import_module("tunix.models.gemma3.model")
    tokens, positions = jnp.arange(1, 9)[None], jnp.arange(8)[None]
    mask = jnp.tril(jnp.ones((1, 8, 8), bool))
    logits, _ = model(tokens, positions, None, mask)
    compressed = compress(model, "v3_4", KEY)
    assert (type(model), type(model.layers[0].attn)) == (module.Gemma3, module.Attention)
    np.testing.assert_array_equal(compressed(tokens, positions, None, mask)[0], logits)
    cache = compressed.init_cache(1, 4096, jnp.float32)
    whole = 2 * 6 * 4096 * 2 * DIM * 2  # bytes in bfloat16
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) < 0.4 * whole
    with pytest.raises(ValueError, match="expected text alone with a compressed cache, got images"):
        compressed(tokens, positions, cache, mask, images=jnp.ones((1, 8, 8, 3)))


def test_what_is_wrong_is_said_at_once():
    model = tunix_model("qwen3")
    with pytest.raises(ValueError, match="expected 2 strategies, one a layer, got 1"):
        compress(model, [rqjax.strategy("v3_4", KEY, DIM)], KEY)
    with pytest.raises(LookupError, match="unknown strategy 'edem_3'; did you mean"):
        compress(model, "edem_3", KEY)
    with pytest.raises(ValueError, match="expected window to be a whole number"):
        compress(model, "eden_3", KEY, window=-1)


@pytest.fixture(scope="module")
def gm():
    """gemma, without the 250 MB of tensorflow, of which kauldron takes the name of a type."""
    tensorflow = types.ModuleType("tensorflow")
    tensorflow.__spec__ = importlib.machinery.ModuleSpec("tensorflow", None)
    tensorflow.Tensor = type("Tensor", (), {})
    sys.modules["tensorflow"] = tensorflow
    from gemma import gm

    _ = gm.nn.Transformer, gm.text.ChatSampler, gm.testing.DummyTokenizer, gm.nn.config.TransformerConfig
    del sys.modules["tensorflow"]
    return gm


PROMPTS = ["Hello there ! My name is Morgane hello world " * 4 + "!", "input string !"]
"""Prompts, of which the second is padded on the right."""


def gemma_model(gm, version):
    kinds = (gm.nn.config.AttentionType.LOCAL_SLIDING, gm.nn.config.AttentionType.GLOBAL)
    extras = dict(GEMMA_2, sliding_window_size=WINDOW)
    if version == 3:
        extras = dict(GEMMA_3, use_qk_norm=True, final_logit_softcap=None)
        extras |= dict(use_post_attn_norm=True, use_post_ffw_norm=True)
    config = gm.nn.config.TransformerConfig(num_embed=14, attention_types=kinds, **SAME, **extras)
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    return model, with_noise(jax.jit(model.init)(KEY, jnp.ones((1, 4), jnp.int32))["params"])


@DONATED
@pytest.mark.parametrize("version", [2, 3])
def test_gemma(gm, version):
    """Tokens of `gm.text.Sampler`, and logits of prompts that it pads, with a cache that is donated."""
    model, params = gemma_model(gm, version)
    tokenizer = gm.testing.DummyTokenizer()

    def sampled(model):
        sampler = gm.text.Sampler(
            model=model, params=params, tokenizer=tokenizer, cache_length=CACHE, max_out_length=STEPS, pad_length=64
        )
        return sampler.sample(PROMPTS, max_new_tokens=STEPS, sampling=gm.text.RandomSampling(), rng=0)

    prompts = [tokenizer.encode(text, add_bos=True) for text in PROMPTS]
    tokens = jnp.array([prompt + [0] * (48 - len(prompt)) for prompt in prompts])
    expected, logits = sampled(model), jax.jit(model.apply)({"params": params}, tokens).logits
    for name in ("float32", "v3_4") if version == 2 else ("float32", "float32+pre_rope", "turboquant_trellis_3"):
        compressed = compress(model, name, KEY, **OPTIONS)
        if name == "float32":
            assert sampled(compressed) == expected
        cache = compressed.init_cache(batch_size=2, dtype=jnp.float32, cache_length=CACHE)
        apply = jax.jit(
            lambda cache, model: model.apply({"params": params}, tokens, cache=cache),
            donate_argnums=0,
            static_argnums=1,
        )
        out = apply(cache, compressed)
        errors = [relative(out.logits[i, : len(prompt)], logits[i, : len(prompt)]) for i, prompt in enumerate(prompts)]
        assert max(errors) < bound(name, 2), name
        assert errors[0] > 1e-3 or name.startswith("float32"), "codes are not looked at"
        lengths = out.cache["layer_0"]["k"].cache.lengths
        assert lengths.tolist() == [len(prompt) for prompt in prompts]


def test_a_conversation_with_gemma(gm):
    """A second turn goes on with the cache of the first, behind padding and where one sequence has ended; logits are
    those of all its tokens without a cache. (gemma 4.0.1 itself sees a slot there that it has never written.)"""
    model, params = gemma_model(gm, 3)
    tokenizer, compressed = gm.testing.DummyTokenizer(), compress(model, "float32", KEY, **OPTIONS)
    sampler = gm.text.Sampler(
        model=compressed,
        params=params,
        tokenizer=tokenizer,
        sampling=gm.text.RandomSampling(),
        forbidden_tokens=(0,),
        cache_length=CACHE,
        max_out_length=STEPS,
        pad_length=8,
    )
    histories, state = [[], []], None
    for turn in (PROMPTS, PROMPTS[1:] * 2):
        out = sampler.sample(turn, max_new_tokens=STEPS, rng=0, last_state=state, return_state=True)
        assert 0 in out.tokens[0] or turn is not PROMPTS, "the first sequence has not ended"
        for i, text in enumerate(turn):
            histories[i] += tokenizer.encode(text, add_bos=state is None)
            *said, _ = (int(token) for token in out.tokens[i] if token)
            histories[i] += said  # the newest has not been fed
        state = out.state
    for i, history in enumerate(histories):
        last = jnp.array([history[-1:]] * 2)
        at = {"positions": jnp.full((2, 1), len(history) - 1), "attention_mask": jnp.ones((2, 1, CACHE), bool)}
        found = compressed.apply({"params": params}, last, cache=state.cache, **at).logits[i, 0]
        assert relative(found, model.apply({"params": params}, jnp.array([history])).logits[0, -1]) < 1e-5


def test_the_examples_of_the_guide(gm):
    text = (Path(rqjax.__file__).parent / "docs" / "models.md").read_text()
    of_tunix, of_gemma = re.findall(r"```python\n((?:(?!```).)*?from (?:tunix|gemma)\b.*?)```", text, re.DOTALL)
    model, params = gemma_model(gm, 3)
    for code, names in (
        (of_tunix, {"model": tunix_model("llama3"), "tokenizer": Bytes()}),
        (of_gemma, {"model": model, "params": params, "tokenizer": gm.testing.DummyTokenizer()}),
    ):
        exec(compile(code, "rqjax/docs/models.md", "exec"), names)
        assert len(getattr(names["out"], "text", names["out"])) == 2
