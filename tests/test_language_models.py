"""Experiments with language models: on the committed decoders where they are judged, on tiny ones elsewhere."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import (
    model_memory,
    models,
    needle_model,
    text,
    train_lm,
    training,
)
from rqjax.nn import Decoder, DecoderConfig, load_decoder
from tests.test_decoder import fields


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
        assert decoded == text.corpus(corpus)[0] + "\0"
    with pytest.raises(ValueError, match="expected a vocabulary of at least 256, got 100"):
        text.make_tokenizer([], 100)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected text in .*empty, found none"):
        text.corpus(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="expected held-out text of more than 99999 tokens"):
        text.windows(small.valid, 99999, 1)


def stepped(folder, stop=None):
    """A short training, stopped by an error before step `stop`."""

    def batches(step):
        if step == stop:
            raise InterruptedError
        return needle_model.sequences(np.random.default_rng(step), 2, 64), np.ones((2, 127), np.float32)

    model = Decoder(DecoderConfig.parse(needle_model.FIELDS), rngs=nnx.Rngs(0))
    evaluate = lambda model: {"norm": float(jnp.linalg.norm(model.norm.weight[...]))}  # noqa: E731
    return training.train(model, batches, evaluate, training.Plan(8, 1e-2, 2), folder)


def test_a_stopped_training_goes_on_to_the_bit(tmp_path):
    whole, curve = stepped(tmp_path / "whole")
    with pytest.raises(InterruptedError):
        stepped(tmp_path / "stopped", stop=5)
    resumed, rest = stepped(tmp_path / "stopped")
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(whole), nnx.state(resumed)))
    assert [row["step"] for row in rest] == [2, 4, 6, 8]
    assert [row["norm"] for row in rest] == [row["norm"] for row in curve]
    assert curve[-1]["loss"] < curve[0]["loss"]
    (tmp_path / "whole" / "training.state").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"is not the state of a training: .*; remove it to begin anew"):
        stepped(tmp_path / "whole")


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


def test_tokenizers_that_do_not_match(tmp_path):
    config = fields(vocab_size=200)
    model = Decoder(DecoderConfig.parse(config), rngs=nnx.Rngs(0))
    train_lm.save_decoder(model, config, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer.json in"):
        models.load(str(tmp_path))
    text.make_tokenizer([], 256).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"does not match: it has 256 tokens, vocab_size of config.json is 200"):
        models.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        models.load(str(tmp_path))


def test_large_checkpoints_in_shards(tmp_path):
    count = model_memory.write(model_memory.SHAPES["tiny"], tmp_path)
    decoder = load_decoder(tmp_path)
    leaves = jax.tree.leaves(nnx.state(decoder))
    assert sum(leaf.size for leaf in leaves) == count
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}


def test_recall_is_learned_and_asked_for():
    tokens = needle_model.sequences(np.random.default_rng(0), 2, 128)
    assert tokens.shape == (2, 128 + 2 * needle_model.ASKED)
    for row in tokens:
        pairs = dict(row[:128].reshape(-1, 2).tolist())
        assert len(pairs) == 64
        assert all(pairs[key] == value for key, value in row[128:].reshape(-1, 2).tolist())
    point = {"folder": "", "contexts": (64,), "steps": 2, "batch_tokens": 128, "sequences": 2, "seeds": 2}
    row = needle_model.run({**point, "keep": "0+0", "context": 64, "strategy": "v3_2"})
    assert 0 <= row["recalled"] < 0.2  # a fresh decoder does not know
    with pytest.raises(ValueError, match="expected context to be an even number from 64 to 2048, got 62"):
        needle_model.check({"strategy": "v3_2", "keep": "0+0", "context": 62})
