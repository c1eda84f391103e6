"""Scales of eight bits in the place of sixteen: the other bits go to the coordinates."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array

import rqjax
from experiments.codes.distortion import distortion
from experiments.data import samples
from experiments.harness.table import Table

MADE_BY = (
    "experiments/codes/distortion.py",
    "experiments/data/samples.py",
    "rqjax/recipes/methods.py",
    "rqjax/arrays/norms.py",
)
TABLES = (
    Table(
        "Mean squared error with a scale of 16 bits, and with one of 8 bits and as many stored bits, and their ratio",
        rows=("dim",),
        columns=("bits",),
        values=("sixteen", "eight", "ratio"),
        each=("method", "data"),
    ),
)


def check(point: dict[str, Any]) -> None:
    for recipe in _recipes(point):
        jax.eval_shape(lambda key, recipe=recipe: recipe(key, point["dim"], point["bits"]), jax.random.key(0))
    samples.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures both scales; `bits` are those of the indices beside a scale of 16 bits."""
    found = [distortion(point["method"], recipe, point) for recipe in _recipes(point)]
    values = {}
    for name, result in zip(("sixteen", "eight"), found, strict=True):
        values |= {name: result["mse"], f"{name}_sd": result["mse_sd"], f"{name}_stored_bits": result["stored_bits"]}
    return {**values, "ratio": found[1]["mse"] / found[0]["mse"]}


def _recipes(point: dict[str, Any]) -> list[Any]:
    """Returns recipes with a scale of 16 bits, and with one of 8 bits."""
    recipe = rqjax.METHODS[point["method"]]

    def of_eight(key: Array, dim: int, bits: float | int) -> Any:
        return dataclasses.replace(recipe(key, dim, bits + 8 / dim), dtype="uint8")  # pyright: ignore[reportArgumentType]

    return [recipe, of_eight]
