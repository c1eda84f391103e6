"""Experiments with language models: on the committed decoders where they are judged, on tiny ones elsewhere."""

import hashlib
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.caches import attention_losses
from experiments.data import samples, text, words
from experiments.language import (
    attention_fidelity,
    calibration,
    generation_throughput,
    model_memory,
    needle_model,
    perplexity,
    train_lm,
)
from experiments.models import layered, models, training
from rqjax.nn import Decoder, DecoderConfig, generate, load_decoder
from tests.nn.test_decoder import CHECKPOINTS, FORWARD, fields

ROOT = CHECKPOINTS.parents[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"def number_{i}(x):\n    return x + {i}  # naïve\n" * 40)
    return str(folder)


def test_bytes_and_byte_pairs(corpus, monkeypatch, tmp_path):
    monkeypatch.setenv("RQJAX_CACHE", str(tmp_path))
    small = text.load(corpus, 256)
    assert small.tokenizer.get_vocab_size() == 256
    assert len(small.tokenizer.encode("naïve\t\0").ids) == 8  # bytes
    pairs = text.load(corpus, 300)
    assert len(pairs.train) < len(small.train) / 2
    for part in (small, pairs):
        decoded = part.tokenizer.decode(part.valid.tolist(), skip_special_tokens=False)
        assert decoded == next(iter(text.corpus(corpus).values())) + "\0"
    with pytest.raises(ValueError, match="expected a vocabulary of at least 256, got 100"):
        text.make_tokenizer([], 100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected text in .*empty, found none"):
        text.corpus(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="expected held-out text of more than 99999 tokens"):
        text.windows(small.valid, 99999, 1)


def test_the_held_out_text_is_pinned(monkeypatch):
    """Text held out of Python's library is the same under every Python, and no model was trained on it."""
    monkeypatch.setattr(words, "corpus", lambda: pytest.fail("the running Python's library was read"))
    held, seen = (text.documents("", part) for part in ("held_out", "seen"))
    whole = hashlib.sha256("\0".join(held.values()).encode()).hexdigest()
    assert whole == "7afe5c99677b426dcff28e184286262f895df91e46bb22f16f137b25f212a2f6"
    assert len("".join(held.values())) > 2**16
    trained_on = set((models.TRAINED / "trained_on.txt").read_text().split())
    assert trained_on.isdisjoint(map(text.digest, held.values()))
    assert trained_on.issuperset(map(text.digest, seen.values()))
    tokenizer = models.load("qwen2-d64").tokenizer
    assert len(text.held_out("", tokenizer)) == sum(len(held_out.encode()) + 1 for held_out in held.values())


def test_training_leaves_out_what_is_held_out_whatever_python_runs(monkeypatch):
    held = text.documents("", "held_out")
    (moved, same), (changed, other) = list(held.items())[:2]
    library = {f"renamed/{moved}": same, changed: other + "# a later release", "new.py": "x = 1"}
    monkeypatch.setattr(words, "corpus", lambda: library)
    assert text.training("") == ["x = 1"]


def stepped(folder, stop=None, steps=8):
    """A short training, stopped by an error before step `stop`."""

    def batches(step):
        if step == stop:
            raise InterruptedError
        return needle_model.sequences(np.random.default_rng(step), 2, 16), np.ones((2, 95), np.float32)

    model = Decoder(DecoderConfig.parse(needle_model.FIELDS), rngs=nnx.Rngs(0))
    evaluate = lambda model: {"norm": float(jnp.linalg.norm(model.norm.weight[...]))}  # noqa: E731
    return training.train(model, batches, evaluate, training.Plan(steps, 1e-2, 2), folder)


@pytest.mark.full
def test_a_stopped_training_goes_on_to_the_bit(tmp_path):
    whole, curve = stepped(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        stepped(tmp_path / "stopped", stop=5)
    resumed, rest = stepped(tmp_path / "stopped")
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(whole), nnx.state(resumed)))
    assert [row["step"] for row in rest] == [2, 4, 6, 8]
    assert [row["norm"] for row in rest] == [row["norm"] for row in curve]
    assert curve[-1]["loss"] < curve[0]["loss"]
    with pytest.raises(ValueError, match="is of another training; remove it to begin anew"):
        stepped(tmp_path / "whole", steps=10)
    (tmp_path / "whole" / "training.state").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"is not the state of a training: .*; remove it to begin anew"):
        stepped(tmp_path / "whole")


@pytest.mark.full
def test_trained_checkpoints_are_read_again(corpus, monkeypatch, tmp_path):
    monkeypatch.setenv("RQJAX_CACHE", str(tmp_path))
    point = {
        "model": "qwen2-d64",
        "corpus": corpus,
        "vocabulary": 280,
        "folder": str(tmp_path),
        "seed": 0,
        "tokens": 1024,
        "batch_tokens": 256,
        "context": 64,
        "long_context": 128,
        "long_share": 0.5,
        "learning_rate": 1e-2,
        "every": 2,
        "valid_windows": 2,
    }
    train_lm.check(point)
    row = train_lm.run(point)
    assert row["valid_nats"] == row["curve"][-1]["valid"] < row["curve"][0]["valid"] < np.log(280)
    assert row["tokens"] == 1024
    model = models.load(str(tmp_path / "qwen2-d64"))
    assert model.decoder.config.vocab_size == model.tokenizer.get_vocab_size() == 280
    assert json.loads((tmp_path / "qwen2-d64" / "curve.json").read_text()) == row["curve"]
    assert train_lm.run(point) == row  # nothing is left to do
    kept = list(text.corpus(corpus).values())[1:]
    assert (tmp_path / "trained_on.txt").read_text().split() == [text.digest(part) for part in kept]


def test_tokenizers_that_do_not_match(tmp_path):
    config = fields(vocab_size=200)
    model = Decoder(DecoderConfig.parse(config), rngs=nnx.Rngs(0))
    train_lm.save_decoder(model, config, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer.json in .*; copy"):
        models.load(str(tmp_path))
    text.make_tokenizer([], 256).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"does not match: it has 256 tokens, the decoder has 200"):
        models.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        models.load(str(tmp_path))


@pytest.mark.full
def test_large_checkpoints_in_shards(tmp_path):
    count = model_memory.write(model_memory.SHAPES["tiny"], tmp_path)
    decoder = load_decoder(tmp_path)
    leaves = jax.tree.leaves(nnx.state(decoder))
    assert sum(leaf.size for leaf in leaves) == count
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}


@pytest.mark.full
def test_recall_is_learned_and_asked_for():
    tokens = needle_model.sequences(np.random.default_rng(0), 2, 64)
    assert tokens.shape == (2, 6 * 64)
    for row in tokens:
        told, asked = row.reshape(2, 64, 3)
        pairs = dict(told[:, 1:].tolist())
        assert len(pairs) == 64
        assert (told[:, 0] == told[:, 2]).all()
        assert all(pairs[key] == value for _, key, value in asked.tolist())
    point = {"folder": "", "stages": (8,), "steps": 2, "batch_tokens": 96, "sequences": 2, "seeds": 2}
    row = needle_model.run({**point, "keep": "0+0", "pairs": 32, "strategy": "v3_2"})
    assert 0 <= row["recalled"] < 0.2  # a fresh decoder does not know
    with pytest.raises(ValueError, match="expected pairs to be a whole number from 1 to 128, got 129"):
        needle_model.check({"strategy": "v3_2", "keep": "0+0", "pairs": 129})


@pytest.mark.full
def test_vectors_of_a_language_model():
    """Queries, keys and values of each layer, as a cache receives them; keys and values are a data set."""
    decoder, arrays = models.captured("qwen2-d64", "", 64)
    assert sorted(arrays) == sorted(f"layers.{i}.{name}" for i in range(4) for name in "qkv")
    assert arrays["layers.0.q"].shape == (64, 4, 64)
    assert arrays["layers.3.v"].shape == (64, 2, 64)
    caches = decoder.caches("float32", jax.random.key(0), 1, 64, dtype=jnp.float32)
    tokens = text.windows(text.held_out("", models.load("qwen2-d64").tokenizer), 64, 1)[:, :-1]
    _, caches = jax.jit(lambda tokens, caches: decoder(tokens, caches))(tokens, caches)
    held = jnp.swapaxes(caches[2].exact_keys[0, :, :64], 0, 1)
    np.testing.assert_allclose(arrays["layers.2.k"], held, atol=1e-4)
    assert samples.sample("kv", 1, 100, 64).shape == (1, 100, 64)
    with pytest.raises(ValueError, match="kv has vectors of 128, 64, 256 dimensions, got dim = 32"):
        samples.sample("kv", 1, 100, 32)


@pytest.mark.full
def test_no_window_of_text_is_on_both_sides_of_a_split(monkeypatch):
    """Keys and values of the training windows say nothing of those that are held out."""

    def calibration(name, corpus, context, count, part):
        assert part is text.held_out
        window = jnp.repeat(jnp.arange(count), context)  # each vector has the number of its window
        return {f"layers.0.{kind}": jnp.broadcast_to(window[:, None, None], (len(window), 2, 64)) for kind in "qkv"}

    monkeypatch.setattr(models, "calibration", calibration)
    monkeypatch.setattr(samples, "_kv_windows", samples._kv_windows.__wrapped__)
    for n in (100, 10**6):
        train, test = samples.split(samples.sample.__wrapped__("kv", 3, n, 64))
        assert train.shape[1] + test.shape[1] == min(n, 8 * 512 * 4)
        assert test.shape[1] == min(n, 8 * 512 * 4) // 4
        for seed in range(3):
            windows = [set(np.unique(part[seed]).tolist()) for part in (train, test)]
            assert windows[0].isdisjoint(windows[1])
            assert len(windows[1]) == 2
    assert len({tuple(np.unique(part)) for part in test}) > 1  # each seed holds out others


POINT = {"model": "qwen2-d64", "corpus": "", "keep": "0+0", "seeds": 2}


@pytest.mark.full
def test_perplexity_of_the_committed_decoder():
    """Four bits cost less than 1.5 %, and QJL hurts in the place of one of them."""
    point = {**POINT, "context": 256, "windows": 8, "chunk": 16}
    row, sketch = (perplexity.run({**point, "strategy": name}) for name in ("v3_4", "turboquant_prod_4"))
    assert abs(row["change"]) < 1.5
    assert row["bits"] == 4.25  # norms of 16 bits
    assert 0 < row["kl"] < 0.05
    assert row["kl"] < sketch["kl"]
    assert row["float_perplexity"] == sketch["float_perplexity"]
    assert min(row[f"{name}_sd"] for name in ("perplexity", "float_perplexity", "change", "kl", "top1")) > 0
    with pytest.raises(ValueError, match="expected context to be a multiple of chunk = 16, got 250"):
        perplexity.check({**point, "strategy": "v3_4", "context": 250})
    with pytest.raises(ValueError, match="expected windows to be a multiple of 2, seeds times kinds of text, got 3"):
        perplexity.check({**point, "strategy": "v3_4", "windows": 3})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param("glm4", "kivi_2", marks=pytest.mark.full),
        pytest.param("gemma3_text", "eden_3", marks=pytest.mark.full),  # layers with two ropes, some with a window
        pytest.param("gpt_oss", "eden_3+pre_rope", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "eden_3", marks=pytest.mark.full),
    ],
)
def test_layers_one_by_one_score_as_the_decoder(family, name):
    model, tokens = load_decoder(CHECKPOINTS / family), np.load(CHECKPOINTS / family / "logits.npz")["tokens"][:, :33]
    step = jax.jit(lambda model, tokens, caches: model(tokens, caches))
    exact = jax.nn.log_softmax(FORWARD(model, tokens[:, :-1]))
    caches = model.caches(name, jax.random.key(0), len(tokens), 32, window=0, sinks=2)
    scores = perplexity._scores(model, caches, jnp.asarray(tokens), layered.exact(model, tokens[:, :-1]), 16)
    found = []
    for part in np.split(tokens[:, :-1], 2, axis=1):
        logits, caches = step(model, part, caches)
        found.append(jax.nn.log_softmax(logits))
    got = jnp.concatenate(found, axis=1)
    assert np.abs(got - exact).max() > 0.01  # codes do something
    for name, log_p in (("nats", got), ("reference", exact)):
        expected = -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(scores[name], expected, rtol=1e-3, atol=1e-4)
    divergence = (jnp.exp(exact) * (exact - got)).sum(-1)
    np.testing.assert_allclose(scores["kl"].mean(1), divergence.mean(1), rtol=1e-2)
    assert (scores["kl"] >= 0).all()


def test_deviations_of_perplexities_are_over_the_windows(monkeypatch):
    """Each window counts once, with the rotations of one of the seeds, whichever."""
    reference = np.array([1.4, 2.0, 1.1, 1.7, 1.5, 1.3], np.float32)
    added = np.array([0.01, 0.02, 0.03, 0.05, 0.08, 0.13], np.float32)
    quantizer, drawn = SimpleNamespace(bits_per_vector=272, dim=64), []

    def caches(strategy, key, batch, max_len, **options):
        same = dict.fromkeys(("key_quantizer", "value_quantizer"), quantizer)
        return (SimpleNamespace(**same, values_in_keys=False, batch=batch, key=key),)

    def scores(decoder, caches, windows, exact, chunk):
        drawn.append(np.asarray(windows).tolist())
        assert caches[0].batch == len(windows)
        assert caches[0].key == jax.random.key(len(drawn) - 1)
        columns = {"kl": added[windows], "top1": added[windows], "nats": exact + added[windows], "reference": exact}
        return {name: x[:, None] for name, x in columns.items()}

    monkeypatch.setattr(perplexity, "_reference", lambda *_: (SimpleNamespace(caches=caches), np.arange(6), reference))
    monkeypatch.setattr(perplexity, "_scores", scores)
    row = perplexity.run({**POINT, "context": 64, "windows": 6, "seeds": 3, "chunk": 16, "strategy": "v3_4"})
    assert drawn == [[0, 3], [1, 4], [2, 5]]
    change, own = 100 * np.expm1(added), np.exp(reference)
    assert row["kl"] == pytest.approx(added.mean())
    assert row["kl_sd"] == pytest.approx(added.std(ddof=1))
    assert row["kl_median"] == pytest.approx(0.04)
    assert row["kl_999"] == pytest.approx(0.13 - 0.05 * 0.005, rel=1e-3)
    assert row["change"] == pytest.approx(100 * np.expm1(added.mean()), rel=1e-4)
    assert row["change_sd"] == pytest.approx(change.std(ddof=1), rel=1e-4)
    assert row["float_perplexity"] == pytest.approx(np.exp(reference.mean()))  # of all tokens together
    assert row["float_perplexity_sd"] == pytest.approx(own.std(ddof=1))
    assert row["perplexity_sd"] == pytest.approx((own * np.exp(added)).std(ddof=1))


@pytest.mark.full
def test_quantizers_learned_from_the_model_itself():
    """Fitted on training text, to each layer and head; the point is checked before anything runs."""
    point = {**POINT, "context": 256, "windows": 2, "chunk": 64, "strategy": "klt_trellis_2"}
    perplexity.check(point)
    row = perplexity.run(point)
    random = perplexity.run({**point, "strategy": "eden_2"})
    assert row["seconds_to_fit"] > 0
    assert random["seconds_to_fit"] is None
    assert row["bits"] == random["bits"] == 2.25
    assert row["kl"] < 0.5 * random["kl"]
    with pytest.raises(KeyError, match="unknown strategy 'rotorquant_learnt_2'; did you mean 'rotorquant_learned'"):
        perplexity.check({**point, "strategy": "rotorquant_learnt_2"})
    with pytest.raises(ValueError, match="the loss 'scores' is for keys"):
        attention_losses.check({"loss": "scores", "side": "values"})


@pytest.mark.full
def test_fidelity_and_throughput_run():
    row = attention_fidelity.run({**POINT, "context": 256, "queries": 8, "strategy": "rotorquant_4"})
    assert row["cosine"] > 0.97
    assert row["cosine_worst"] < row["cosine"]
    assert row["top1"] <= row["top5"]
    plain = {"baseline": "float32", "weights": "float32"}
    row = generation_throughput.run({"model": "qwen2-d64", "tokens": 64, "strategy": "v3_4", "rounds": 1, **plain})
    assert row["vs_float32"] > 0


@pytest.mark.full
def test_fidelity_of_what_is_fitted():
    """A mean that turns, learned from the decoder's own text."""
    point = {**POINT, "context": 256, "queries": 8}
    names = ("eden_2+turned:calibrated", "eden_2")
    turned, plain = (attention_fidelity.run({**point, "strategy": name})["kl"] for name in names)
    assert turned < 0.7 * plain
    calibration.check({"model": "tiny", "strategy": "eden_2+turned", "layers": 2})
    row = calibration.run({"model": "tiny", "strategy": "eden_2+turned", "layers": 2, "tokens": 256, "context": 128})
    assert row["beyond_weights_gb"] > 0
    with pytest.raises(KeyError, match=r"unknown model 'Llama 3\.2 3b'; did you mean 'Llama 3\.2 3B'"):
        calibration.check({"model": "Llama 3.2 3b"})


@pytest.mark.full
def test_plain_and_compressed_caches_of_the_throughput_make_the_same_tokens():
    """Both timed ways compute the decoder."""
    decoder = models.load("qwen2-d64").decoder
    tokens = np.arange(40, 80)[None]
    logits = FORWARD(decoder, tokens)
    plain = [(jnp.zeros((1, 2, 64, 64)), jnp.zeros((1, 2, 64, 64)), jnp.zeros((), jnp.int32)) for _ in range(4)]
    caches = decoder.caches("float32", jax.random.key(0), 1, 64, dtype=jnp.float32)
    for token in tokens[0]:
        made, plain = generation_throughput._plain(decoder, jnp.full((1, 1), token), plain)
        other, caches = generation_throughput._compressed(decoder, jnp.full((1, 1), token), caches)
    assert int(made[0, 0]) == int(other[0, 0]) == int(logits[0, -1].argmax())


@pytest.mark.full
def test_generation():
    """Every token is the likeliest after those before, if there is no temperature."""
    model = Decoder(DecoderConfig.parse(fields(num_hidden_layers=2)), rngs=nnx.Rngs(0))
    caches = model.caches("float32", jax.random.key(0), 1, 24, dtype=jnp.float32)
    prompt = [3, 1, 4, 1, 5]
    tokens = generate(model, caches, np.array(prompt), key=jax.random.key(0), temperature=0)
    made = [next(tokens)[0] for _ in range(20)]
    with pytest.raises(ValueError, match="no room in the caches: 24 tokens are held"):
        next(tokens)
    logits = FORWARD(model, np.array([prompt + made]))
    assert made == logits[0, 4:-1].argmax(-1).tolist()
    with pytest.raises(ValueError, match="expected a prompt of at least one token"):
        next(generate(model, caches, np.array([], int), key=jax.random.key(0)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "flag", "message"),
    [
        ("generate", "--strategy=v3_44", "unknown strategy 'v3_44'; did you mean 'v3_4'"),
        ("capture", "--tokens=0", "expected tokens to be a whole number from 1 to 1048576, got 0"),
        ("capture", "--modle=x", "Unknown command line flag 'modle'. Did you mean: model"),
    ],
)
def test_wrong_flags_are_one_line(module, flag, message):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", flag], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
