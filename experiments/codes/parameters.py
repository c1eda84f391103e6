"""Parameters of each rotation and its codebook: RotorQuant's Table 1."""

from typing import Any

import jax

import rqjax
from experiments.harness import published
from experiments.harness.table import Table

MADE_BY = ("rqjax/recipes/methods.py",)
TABLES = (Table("Parameters", rows=("dim",), columns=("method",), values=("parameters", "published", "fewer")),)


def run(point: dict[str, Any]) -> dict[str, Any]:
    counts = {name: _parameters(name, point["dim"], point["bits"]) for name in (point["method"], "turboquant")}
    return {
        "parameters": counts[point["method"]],
        "published": published.PARAMETERS.get(point["method"], {}).get(point["dim"]),
        "fewer": f"{counts['turboquant'] / counts[point['method']]:,.0f}x" if point["method"] != "turboquant" else None,
    }


def _parameters(method: str, dim: int, bits: int) -> int:
    """Counts the numbers in a quantizer's arrays, from their shapes."""
    quantizer = jax.eval_shape(lambda key: rqjax.METHODS[method](key, dim, bits), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(quantizer))
