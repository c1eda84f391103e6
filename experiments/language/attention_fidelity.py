"""Attention of a language model on its own queries, keys and values, from compressed caches: RotorQuant's Table 6."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.caches import attention_error
from experiments.harness import published
from experiments.harness.table import Table
from experiments.language.perplexity import training_text
from experiments.models import fitted
from experiments.models.models import captured
from rqjax.core import check_int

MADE_BY = (
    "experiments/caches/attention_error.py",
    "experiments/language/perplexity.py",
    "experiments/models/models.py",
    "rqjax/recipes/strategies.py",
    "rqjax/recipes/methods.py",
)
TABLES = (
    Table(
        "Attention of whole models: cosine of the output, ± over seeds, and of the worst layer; shares of heads and"
        " queries whose first token stays first, and among the first five; divergence of the weights (KL,"
        " nats); as published of Qwen2.5-3B, cosine, top1, top5",
        rows=("strategy",),
        columns=("context",),
        values=("cosine", "cosine_worst", "top1", "top5", "kl", "published"),
        each=("model",),
    ),
)


def check(point: dict[str, Any]) -> None:
    fitted.check(point["strategy"])
    attention_error.keep(point["keep"])
    check_int("seeds", point["seeds"], 2, 2**20)  # of which there is a deviation


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures the newest `queries` tokens of `context`, on all heads of each layer, for each of the seeds."""
    decoder, arrays = captured(point["model"], point["corpus"], point["context"])
    layers, window = decoder.config.num_hidden_layers, attention_error.keep(point["keep"])
    names = ("kl", "top1", "top5", "cosine")
    values = np.empty((point["seeds"], layers, len(names)))
    tokens = functools.partial(training_text, point["model"], point["corpus"], point["context"])
    for seed in range(point["seeds"]):
        key = jax.random.key(seed)
        parts = fitted.strategies(decoder, point["strategy"], key, tokens)
        for layer in range(layers):
            q, k, v = (arrays[f"layers.{layer}.{name}"][None] for name in "qkv")
            rope, own_key = decoder.config.ropes[layer], jax.random.fold_in(key, layer)
            strategy = rqjax.strategy(parts, own_key, q.shape[3]) if isinstance(parts, str) else parts[layer]
            if strategy.key_form.of_rope:
                q, k = (rope.inverse(x, jnp.arange(x.shape[1])[:, None]) for x in (q, k))
            options = {"window": window[0], "sinks": window[1], "dtype": jnp.float32}
            cache = strategy.cache(1, k.shape[2], point["context"], rope=rope, **options)
            reach = decoder.config.windows[layer]
            row = attention_error.errors(cache, q[:, -point["queries"] :], k, v, reach)
            values[seed, layer] = [row[name] for name in names]
    jax.clear_caches()  # or three rows have more executables than Linux has mappings of memory for a process
    result = {name: float(values[:, :, i].mean()) for i, name in enumerate(names)}
    result |= {f"{name}_sd": float(values[:, :, i].mean(1).std(ddof=1)) for i, name in enumerate(names)}
    result["cosine_worst"] = float(values[:, :, names.index("cosine")].mean(0).min())
    return result | {"published": published.FIDELITY.get((point["strategy"], point["context"]))}
