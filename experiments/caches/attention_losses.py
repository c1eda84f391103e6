"""Training quantizers of keys or values for their own error, or for the error of attention.

`rotor_chain` with levels of each coordinate is fitted to each layer and head on training text, by each loss. Attention
is then measured on held-out text, from a cache that has only the keys, or only the values, in codes.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.caches import attention_error
from experiments.harness import plot as plots
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from experiments.models.models import calibration, captured
from rqjax.core import Registry
from rqjax.learning import losses
from rqjax.recipes.learned import with_lloyd_levels
from rqjax.rotations import Chain, Hadamard, Rotor

MADE_BY = ("experiments/caches/attention_error.py", "experiments/models/models.py", "rqjax/learning/*.py")
TABLES = (
    Table(
        "Attention on held-out text after training by each loss: divergence of the weights (KL, nats), first token"
        " kept, cosine of the output, squared error of the codes",
        rows=("bits", "loss"),
        columns=(),
        values=("kl", "top1", "cosine", "mse"),
        each=("model", "side"),
    ),
)

LOSSES: Registry = Registry(
    "loss",
    {
        "none": lambda q: losses.Distortion(),
        "distortion": lambda q: losses.Distortion(),
        "scores": losses.ScoreError.of,
        "output": lambda q: losses.OutputError(),
    },
)
"""Functions from the queries (m, d) that meet a head of keys to a loss."""


def check(point: dict[str, Any]) -> None:
    _ = LOSSES[point["loss"]]
    if point["side"] not in ("keys", "values"):
        raise ValueError(f"expected side 'keys' or 'values', got {point['side']!r}")
    if point["loss"] == "output" and point["side"] == "keys":
        raise ValueError("the loss 'output' is for values")
    if point["loss"] == "scores" and point["side"] == "values":
        raise ValueError("the loss 'scores' is for keys")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one loss on all layers and heads of a model, for each of the seeds."""
    train = calibration(point["model"], point["corpus"], point["context"], point["windows"])
    decoder, held = captured(point["model"], point["corpus"], point["context"])
    names = ("kl", "top1", "cosine", "mse")
    values = np.empty((point["seeds"], decoder.config.num_hidden_layers, len(names)))
    for layer in range(values.shape[1]):
        options = decoder.attention_options(layer)
        arrays = [train[f"layers.{layer}.{name}"] for name in "qkv"]
        fitted = _fit(point, layer, arrays, options["scale"])
        for seed in range(point["seeds"]):
            quantizer = jax.tree.map(lambda leaf, seed=seed: leaf[seed], fitted)
            row = _measure(point, quantizer, [held[f"layers.{layer}.{name}"] for name in "qkv"], options)
            values[seed, layer] = [row[name] for name in names]
    means = values.mean(axis=1)
    return mean_and_deviation({name: means[:, i] for i, name in enumerate(names)})


def _fit(point: dict[str, Any], layer: int, qkv: list[jax.Array], scale: float) -> Any:
    """Fits quantizers (seeds, heads) to the keys or values of a layer."""
    q, k, v = qkv
    x = jnp.swapaxes(k if point["side"] == "keys" else v, 0, 1)
    heads, time, dim = x.shape
    queries = jnp.swapaxes(q.reshape(time, heads, -1, dim), 0, 1)
    chosen = jax.random.choice(jax.random.key(layer), time, (point["queries"],), replace=False)
    weights = _weights(queries, jnp.swapaxes(k, 0, 1), point["context"], scale)
    train = _trainer(point["loss"], point["bits"], point["steps"])
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), layer), (point["seeds"], heads))
    return train(keys, x, queries[:, chosen].reshape(heads, -1, dim), weights)


@functools.cache
def _trainer(loss: str, bits: int, steps: int) -> Any:
    def one(key: jax.Array, x: jax.Array, queries: jax.Array, weights: jax.Array) -> Any:
        first, second, third = jax.random.split(key, 3)
        rotation = Chain((Rotor.random(first, x.shape[1]), Hadamard.random(second, x.shape[1])))
        quantizer = with_lloyd_levels(rotation, x, bits)
        if loss == "none":
            return quantizer
        return rqjax.fit(
            quantizer,
            (x, weights) if loss == "output" else x,
            third,
            where=lambda q: (q.inner.rotation, q.inner.inner),
            loss=LOSSES[loss](queries),
            steps=steps,
            patience=20,
        )[0]

    heads = jax.vmap(one, (0, 0, 0, 0))
    return jax.jit(jax.vmap(heads, (0, None, None, None)))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _weights(q: jax.Array, k: jax.Array, context: int, scale: float) -> jax.Array:
    """Sums each token's squared attention weight over queries (heads, time); queries are 16 tokens apart."""

    def window(q: jax.Array, k: jax.Array) -> jax.Array:
        at = jnp.arange(0, context, 16)
        scores = scale * jnp.einsum("qgd,td->gqt", q[at], k, precision="highest")
        seen = jnp.arange(context) <= at[:, None]
        return jnp.sum(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) ** 2, axis=(0, 1))

    split = lambda x: x.reshape(x.shape[0], -1, context, *x.shape[2:])  # noqa: E731
    return jax.vmap(jax.vmap(window))(split(q), split(k)).reshape(k.shape[:2])


def _measure(point: dict[str, Any], quantizer: Any, qkv: list[jax.Array], options: dict[str, Any]) -> dict[str, Any]:
    """Measures attention of the newest queries on all heads."""
    q, k, v = qkv
    q, k, v = q[None] * options["scale"] * q.shape[-1] ** 0.5, k[None], v[None]
    coded = rqjax.PerHead(quantizer)
    exact = rqjax.Exact(q.shape[-1], "float32")
    keys, values = (coded, exact) if point["side"] == "keys" else (exact, coded)
    cache = rqjax.KVCache.init(1, k.shape[2], k.shape[1], keys, values, window=0, sinks=0, dtype=jnp.float32)
    result = attention_error.errors(cache, q[:, -point["newest"] :], k, v, options["sliding_window"])
    return {**result, "mse": _error(coded, jnp.swapaxes(k if point["side"] == "keys" else v, 1, 2))}


@jax.jit
def _error(quantizer: rqjax.PerHead, x: jax.Array) -> jax.Array:
    return rqjax.metrics.relative_mse(x, quantizer.decode(quantizer.encode(x)))


def plot(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    named = [
        {**row, "point": {**row["point"], "panel": f"{row['point']['model']}, {row['point']['bits']} bits"}}
        for row in rows
        if row["point"]["side"] == "keys"
    ]
    style: dict[str, Any] = {"series": "loss", "panel": "panel", "note": "bars: deviation over draws"}
    return [plots.dots(named, folder / "kl.png", x="kl", **style)] if named else []
