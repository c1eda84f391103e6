"""Rank of a model's keys and values: how many dimensions of a head hold most of their energy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.table import Table
from experiments.models.models import captured

PARTS = ("keys before rotary positions", "keys", "values")
MADE_BY = ("experiments/models/models.py", "rqjax/rotations/rope.py")
TABLES = (
    Table(
        "Dimensions of a head that hold 90 and 99 % of the energy, mean over layers and heads ± over layers; those of"
        " all heads of a layer together, as a share of their dimensions",
        rows=("model", "part", "dim"),
        columns=(),
        values=("dims_90", "dims_99", "together_99"),
    ),
)


def check(point: dict[str, Any]) -> None:
    if point["part"] not in PARTS:
        raise ValueError(f"expected part to be one of {PARTS}, got {point['part']!r}")


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures held-out tokens but for the first `sinks`, whose norms would rule."""
    decoder, arrays = captured(point["model"], point["corpus"], point["tokens"])
    side, before = ("v" if point["part"] == "values" else "k"), point["part"] == PARTS[0]
    rows = []
    for layer, rope in enumerate(decoder.config.ropes):
        x = arrays[f"layers.{layer}.{side}"]
        x = (rope.inverse(x, jnp.arange(len(x))[:, None]) if before else x)[point["sinks"] :]
        single = jnp.swapaxes(x, 0, 1)
        whole = x.reshape(1, len(x), -1)
        rows.append([dims(single, 0.9).mean(), dims(single, 0.99).mean(), dims(whole, 0.99).mean() / whole.shape[2]])
    columns = dict(zip(("dims_90", "dims_99", "together_99"), np.array(rows).T, strict=True))
    result = {name: float(x.mean()) for name, x in columns.items()}
    return {
        **result,
        **{f"{name}_sd": float(x.std(ddof=1)) for name, x in columns.items()},
        "dim": decoder.config.head_dim,
    }


def dims(x: jax.Array, share: float) -> np.ndarray:
    """Returns how many principal axes of vectors (heads, n, d) hold a share of their energy; no mean is subtracted."""
    moments = jnp.einsum("hnd,hne->hde", x, x, precision="highest")
    energies = np.linalg.eigvalsh(np.asarray(moments, np.float64))[:, ::-1]
    return (np.cumsum(energies, axis=1) < share * energies.sum(axis=1, keepdims=True)).sum(axis=1) + 1
