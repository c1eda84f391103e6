"""Trains small decoders on text, and writes them as checkpoints in Hugging Face's layout."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.data import text
from experiments.harness.table import Table
from experiments.models import models
from experiments.models.training import Plan, train
from rqjax.core.treefile import replacing
from rqjax.nn import Decoder, DecoderConfig, save_decoder

MADE_BY = ("experiments/models/training.py", "experiments/data/text.py", "rqjax/nn/decoder.py")
TABLES = (
    Table(
        "Decoders trained on text",
        rows=("model",),
        columns=(),
        values=("parameters", "tokens", "train_nats", "valid_nats", "valid_bits_per_byte", "minutes"),
    ),
)


def check(point: dict[str, Any]) -> None:
    models.SHAPES[point["model"]]
    if point["batch_tokens"] % point["long_context"] or point["batch_tokens"] % point["context"]:
        raise ValueError(f"expected batch_tokens to be a multiple of both contexts, got {point['batch_tokens']}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Trains one model and writes it to `folder`/<model>; a training that was stopped goes on.

    `folder`/trained_on.txt has the digest of each file that it was trained on.
    """
    folder, name = Path(point["folder"]) / point["model"], point["model"]
    data = text.load(point["corpus"], point["vocabulary"])
    size = data.tokenizer.get_vocab_size()
    fields = {**models.SHAPES[name], "vocab_size": size, "eos_token_id": data.tokenizer.token_to_id(text.END)}
    model = Decoder(DecoderConfig.parse(fields), rngs=nnx.Rngs(point["seed"]))
    steps = point["tokens"] // point["batch_tokens"]

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        context = point["long_context"] if step >= steps * (1 - point["long_share"]) else point["context"]
        rng = np.random.default_rng((point["seed"], step))
        starts = rng.integers(0, len(data.train) - context, point["batch_tokens"] // context)
        batch = data.train[starts[:, None] + np.arange(context + 1)].astype(np.int32)
        return batch, np.ones((len(starts), context), np.float32)

    held_out = text.windows(data.valid, point["long_context"], point["valid_windows"])

    def evaluate(model: Decoder) -> dict[str, float]:
        return {"valid": float(np.mean([_loss(model, window[None]) for window in held_out]))}

    model, curve = train(model, batches, evaluate, Plan(steps, point["learning_rate"], point["every"]), folder)
    save_decoder(model, fields, folder)
    data.tokenizer.save(str(folder / "tokenizer.json"))
    (folder.parent / "trained_on.txt").write_text("\n".join(data.trained_on) + "\n")
    with replacing(folder / "curve.json") as file:
        file.write_text(json.dumps(curve) + "\n")
    bytes_per_token = np.mean([len(data.tokenizer.decode(w).encode()) / len(w) for w in held_out])
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))),
        "tokens": int(curve[-1]["tokens"]),
        "train_nats": curve[-1]["loss"],
        "valid_nats": curve[-1]["valid"],
        "valid_bits_per_byte": float(curve[-1]["valid"] / np.log(2) / bytes_per_token),
        "minutes": curve[-1]["seconds"] / 60,
        "curve": curve,
    }


@jax.jit
def _loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    logits, _ = model(tokens[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))
