"""Recall of a trained decoder through compressed caches: values of keys that it has read, among many pairs.

The task is multi-query associative recall (Arora et al., 2023). A text has pairs of a key and a value, all keys
different. Then it has keys in another order, each of which is to be followed by its value. A pair is written value,
key, value, so that a decoder of two layers learns it in minutes. The first layer brings the value to the key, and the
second one finds the key.
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer, models as word_models
from tokenizers.pre_tokenizers import WhitespaceSplit

from experiments.caches.attention_error import keep
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models import fitted
from experiments.models.training import Plan, train
from rqjax.core import check_int
from rqjax.nn import Decoder, DecoderConfig, save_decoder

KEYS, VALUES = 128, 64
ASK = KEYS + VALUES
"""The token before a key whose value is asked for."""
FIELDS = {
    "model_type": "llama",
    "vocab_size": ASK + 1,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}
MADE_BY = ("experiments/models/training.py", "rqjax/recipes/strategies.py", "rqjax/recipes/methods.py")
TABLES = (
    Table(
        "Values recalled exactly, of all that were asked for",
        rows=("strategy",),
        columns=("pairs",),
        values=("recalled",),
        footers=("recalled_float",),
        each=("keep",),
    ),
)


def check(point: dict[str, Any]) -> None:
    fitted.check(point["strategy"])
    keep(point["keep"])
    check_int("pairs", point["pairs"], 1, KEYS)
    check_int("seeds", point["seeds"], 1, 2**20)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Counts exact matches in `sequences` sequences, for each of the seeds. A seed draws the rotations, the pairs, and
    other pairs that quantizers learn from."""
    decoder = _decoder(point["folder"], tuple(point["stages"]), point["steps"], point["batch_tokens"])
    window, sinks = keep(point["keep"])

    def one(strategy: str, seed: int) -> float:
        tokens = sequences(np.random.default_rng((1, seed)), point["sequences"], point["pairs"])
        key, others = jax.random.key(seed), sequences(np.random.default_rng((3, seed)), 16, point["pairs"])
        parts = fitted.strategies(decoder, strategy, key, lambda: jnp.asarray(others))
        caches = decoder.caches(parts, key, len(tokens), tokens.shape[1], window=window, sinks=sinks)
        return float(_recalled(decoder, caches, tokens))

    recalled, exact = (
        np.array([one(name, seed) for seed in range(point["seeds"])]) for name in (point["strategy"], "float32")
    )
    return mean_and_deviation({"recalled": recalled}) | {"recalled_float": float(exact.mean())}


def sequences(rng: np.random.Generator, count: int, pairs: int) -> np.ndarray:
    """Draws tokens (count, 6 pairs): each pair as value, key, value; then in another order as `ASK`, key, value."""
    keys = rng.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)[:, :pairs]
    values = KEYS + rng.integers(0, VALUES, keys.shape)
    order = rng.permuted(np.tile(np.arange(pairs), (count, 1)), axis=1)
    asked = [np.take_along_axis(x, order, axis=1) for x in (keys, values)]
    told = np.stack([values, keys, values], axis=-1)
    tokens = np.concatenate([told, np.stack([np.full_like(keys, ASK), *asked], axis=-1)], axis=1)
    return tokens.reshape(count, -1).astype(np.int32)


def words(tokens: np.ndarray) -> list[str]:
    """Writes tokens as the tokenizer reads and writes them: "k007" is a key, "v07" a value, "?" `ASK`."""
    names = [*(f"k{i:03}" for i in range(KEYS)), *(f"v{i:02}" for i in range(VALUES)), "?"]
    return [names[token] for token in tokens]


def tokenizer() -> Tokenizer:
    """Makes a tokenizer of the words, with spaces between."""
    made = Tokenizer(word_models.WordLevel({word: i for i, word in enumerate(words(np.arange(ASK + 1)))}, "?"))
    made.pre_tokenizer = WhitespaceSplit()
    return made


@jax.jit
def _recalled(decoder: Decoder, caches: Any, tokens: jax.Array) -> jax.Array:
    told = tokens.shape[1] // 2
    _, caches = decoder(tokens[:, :told], caches, newest=1)
    logits, _ = decoder(tokens[:, told:], caches)
    return jnp.mean(logits[:, 1::3].argmax(-1) == tokens[:, told + 2 :: 3])


@functools.lru_cache(maxsize=1)
def _decoder(folder: str, stages: tuple[int, ...], steps: int, batch_tokens: int) -> Decoder:
    """Trains the decoder on so many pairs a sequence in one stage after the other; `folder`, if not empty, keeps it, as
    a checkpoint, too."""
    model = Decoder(DecoderConfig.parse(FIELDS), rngs=nnx.Rngs(0))

    def batches(step: int) -> tuple[np.ndarray, np.ndarray]:
        pairs = stages[step * len(stages) // steps]
        tokens = sequences(np.random.default_rng((0, step)), batch_tokens // (6 * pairs), pairs)
        wanted = np.zeros((len(tokens), tokens.shape[1] - 1), np.float32)
        wanted[:, 1::3] = 1
        return tokens, wanted

    def evaluate(model: Decoder) -> dict[str, float]:
        tokens = sequences(np.random.default_rng(2), 16, max(stages))
        caches = model.caches("float32", jax.random.key(0), 16, tokens.shape[1], dtype=jnp.float32)
        return {"recalled": float(_recalled(model, caches, tokens))}

    with tempfile.TemporaryDirectory() as temporary:
        path = Path(folder or temporary) / f"recall-{steps}"
        model = train(model, batches, evaluate, Plan(steps, 3e-3, max(1, steps // 20)), path)[0]
        save_decoder(model, FIELDS, path)
        tokenizer().save(str(path / "tokenizer.json"))
        return model


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    path, note = folder / "recalled.png", "bars: deviation over draws"
    return [plots.curves(rows, path, x="pairs", y="recalled", series="strategy", note=note)]
