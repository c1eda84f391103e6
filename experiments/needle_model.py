"""Recall of a trained decoder through compressed caches: values of keys that it has read, among many pairs.

The task is multi-query associative recall (Arora et al., 2023): pairs of a key and a value, all keys different, then
keys in another order, each of which is to be followed by its value. A decoder of two layers learns it here.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rqjax
from experiments import plot as plots
from experiments.attention_error import keep
from experiments.table import Table
from experiments.training import Plan, train
from rqjax.nn import Decoder, DecoderConfig

KEYS, VALUES = 1024, 64
FIELDS = {
    "model_type": "llama",
    "vocab_size": KEYS + VALUES,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}
ASKED = 32
"""Pairs that are asked for after each context."""

TABLES = (
    Table(
        "Values recalled exactly, of all that were asked for",
        rows=("strategy",),
        columns=("context",),
        values=("recalled",),
        footers=("recalled_float",),
        each=("keep",),
    ),
)


def check(point: dict[str, Any]) -> None:
    rqjax.strategy(point["strategy"], jax.random.key(0), 64)
    keep(point["keep"])
    if point["context"] % 2 or not ASKED <= point["context"] // 2 <= KEYS:
        raise ValueError(
            f"expected context to be an even number from {2 * ASKED} to {2 * KEYS}, got {point['context']}"
        )


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Exact matches of `sequences` sequences, for each of the seeds; a seed draws the rotations and the pairs."""
    decoder = _decoder(point["folder"], tuple(point["contexts"]), point["steps"], point["batch_tokens"])
    window, sinks = keep(point["keep"])

    def one(strategy: str, seed: int) -> float:
        tokens = sequences(np.random.default_rng((1, seed)), point["sequences"], point["context"])
        max_len = tokens.shape[1]
        caches = decoder.caches(strategy, jax.random.key(seed), len(tokens), max_len, window=window, sinks=sinks)
        return float(_recalled(decoder, caches, tokens, point["context"]))

    found = {name: [one(name, seed) for seed in range(point["seeds"])] for name in (point["strategy"], "float32")}
    mine = found[point["strategy"]]
    return {
        "recalled": float(np.mean(mine)),
        "recalled_sd": float(np.std(mine, ddof=1)),
        "recalled_float": float(np.mean(found["float32"])),
    }


def sequences(rng: np.random.Generator, count: int, context: int) -> np.ndarray:
    """(count, context + 2 ASKED) tokens: pairs, then some of them again."""
    keys = rng.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)[:, : context // 2]
    pairs = np.stack([keys, KEYS + rng.integers(0, VALUES, keys.shape)], axis=-1)
    order = rng.permuted(np.tile(np.arange(context // 2), (count, 1)), axis=1)[:, :ASKED]
    asked = np.take_along_axis(pairs, order[:, :, None], axis=1)
    return np.concatenate([pairs, asked], axis=1).reshape(count, -1).astype(np.int32)


@functools.partial(jax.jit, static_argnums=3)
def _recalled(decoder: Decoder, caches: Any, tokens: jax.Array, context: int) -> jax.Array:
    _, caches = decoder(tokens[:, :context], caches, newest=1)
    logits, _ = decoder(tokens[:, context:], caches)
    return jnp.mean(logits[:, ::2].argmax(-1) == tokens[:, context + 1 :: 2])


@functools.lru_cache(maxsize=1)
def _decoder(folder: str, contexts: tuple[int, ...], steps: int, batch_tokens: int) -> Decoder:
    """The decoder, trained on contexts of all lengths in turn; kept in `folder`, if that is not empty."""
    model = Decoder(DecoderConfig.parse(FIELDS), rngs=nnx.Rngs(0))

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        context = contexts[step % len(contexts)]
        tokens = sequences(np.random.default_rng((0, step)), batch_tokens // context, context)
        wanted = np.zeros((len(tokens), tokens.shape[1] - 1), np.float32)
        wanted[:, context::2] = 1
        return tokens, wanted

    def evaluate(model: Decoder) -> dict[str, float]:
        tokens = sequences(np.random.default_rng(2), 16, max(contexts))
        return {"recalled": float(_exactly(model, tokens, max(contexts)))}

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(folder or temporary) / f"recall-{steps}"
        return train(model, batches, evaluate, Plan(steps, 3e-3, max(1, steps // 20)), path)[0]


@functools.partial(jax.jit, static_argnums=2)
def _exactly(model: Decoder, tokens: jax.Array, context: int) -> jax.Array:
    logits, _ = model(tokens[:, :-1])
    return jnp.mean(logits[:, context::2].argmax(-1) == tokens[:, context + 1 :: 2])


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    path = folder / "recalled.png"
    return [plots.curves(rows, path, x="context", y="recalled", series="strategy")]
