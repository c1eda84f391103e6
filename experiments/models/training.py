"""Training of decoders: AdamW on the next token, resumed to the bit after a kill."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from rqjax.core.treefile import replacing
from rqjax.nn import Decoder

Batches = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""Function from a step to tokens (batch, time + 1), and which of the last `time` are to be predicted."""


class Plan(NamedTuple):
    steps: int
    learning_rate: float
    every: int
    """Steps between two evaluations, each of which also saves."""


def train(
    model: Decoder, batches: Batches, evaluate: Callable[[Decoder], dict[str, float]], plan: Plan, folder: Path
) -> tuple[Decoder, list[dict[str, float]]]:
    """Trains, or goes on from what `folder` holds of this training.

    Returns:
      The trained decoder, and the curve: step, tokens, seconds, loss and what `evaluate` returns, at each evaluation.

    Raises:
      ValueError: the folder holds another training: one of another plan, first batch or initial weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    graph, params = nnx.split(model)
    warmup = max(1, plan.steps // 50)
    schedule = optax.warmup_cosine_decay_schedule(0, plan.learning_rate, warmup, plan.steps, plan.learning_rate / 20)
    decayed = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)  # noqa: E731
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=decayed)
    )

    def loss(params: Any, tokens: jax.Array, wanted: jax.Array) -> jax.Array:
        logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(losses * wanted) / jnp.sum(wanted)

    def step(state: Any, tokens: jax.Array, wanted: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, tokens, wanted)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    step = jax.jit(step, donate_argnums=0)
    own = hashlib.sha256(repr(plan).encode())
    for array in (*batches(0), *jax.tree.leaves(params)):
        own.update(np.asarray(array).tobytes())
    state, curve = _resume(folder / "training.state", (params, optimizer.init(params)), own.hexdigest())
    first = int(curve[-1]["step"]) if curve else 0
    start = time.perf_counter() - (curve[-1]["seconds"] if curve else 0)
    tokens, losses = int(curve[-1]["tokens"]) if curve else 0, []
    bar = tqdm(range(first, plan.steps), desc=folder.name, initial=first, total=plan.steps, disable=None)
    for i in bar:
        batch, wanted = batches(i)
        state, value = step(state, batch, wanted)
        tokens += int(wanted.sum())
        losses.append(float(value))
        if (i + 1) % plan.every == 0 or i + 1 == plan.steps:
            row = {"step": i + 1, "tokens": tokens, "loss": float(np.mean(losses))}
            row |= evaluate(nnx.merge(graph, state[0])) | {"seconds": round(time.perf_counter() - start, 1)}
            curve.append(row)
            losses = []
            _save(folder / "training.state", state, {"curve": json.dumps(curve), "training": own.hexdigest()})
            bar.set_postfix({name: f"{value:.3f}" for name, value in row.items() if isinstance(value, float)})
    return nnx.merge(graph, state[0]), curve


def _save(path: Path, state: Any, metadata: dict[str, str]) -> None:
    from safetensors.flax import save_file

    leaves = {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state))}
    with replacing(path) as file:
        save_file(leaves, file, metadata)


def _resume(path: Path, state: Any, training: str) -> tuple[Any, list[dict[str, float]]]:
    """Loads the state that this training saved, or returns the initial one."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return state, []
    leaves, structure = jax.tree.flatten(state)
    try:
        with safe_open(path, framework="flax") as file:
            saved = [file.get_tensor(str(i)) for i in range(len(leaves))]
            metadata = file.metadata()
            curve = json.loads(metadata["curve"])
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the state of a training: {error}; remove it to begin anew") from None
    if [leaf.shape for leaf in saved] != [leaf.shape for leaf in leaves] or metadata.get("training") != training:
        raise ValueError(f"{path} is of another training; remove it to begin anew")
    return jax.tree.unflatten(structure, saved), curve
