"""How well rotations mix structured data: the table that isotropic data cannot make."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import rqjax
from experiments import plot as plots, published
from experiments.distortion import distortion
from experiments.table import Row, Table
from rqjax.quantizer import Registry
from rqjax.rotations import Chain, Dense, Hadamard, Identity, Permutation, Rotor

TABLES = (
    Table(
        "Relative mean squared error of Lloyd-Max after each rotation",
        rows=("bits", "dim", "rotation"),
        columns=("data",),
        values=("mse", "reference"),
    ),
)


def _rounds(rotation: Any, count: int, permute: bool = False):
    def make(key, dim):
        parts = []
        for part_key in jax.random.split(key, count):
            rotation_key, permutation_key = jax.random.split(part_key)
            parts += [Permutation.random(permutation_key, dim)] if permute and parts else []
            parts += [rotation.random(rotation_key, dim)]
        return Chain(tuple(parts))

    return make


ROTATIONS = Registry(
    "rotation",
    {
        "identity": lambda key, dim: Identity(dim),
        "dense": Dense.haar,
        "hadamard": Hadamard.random,
        "hadamard_2": _rounds(Hadamard, 2),
        "rotor": Rotor.random,
        "rotor_5": _rounds(Rotor, 5, permute=True),
        "rotor_10": _rounds(Rotor, 10, permute=True),
        "hadamard_rotor": lambda key, dim: Chain(
            (Hadamard.random(jax.random.fold_in(key, 0), dim), Rotor.random(jax.random.fold_in(key, 1), dim))
        ),
        "rotor_chain": lambda key, dim: Chain(
            (Rotor.random(jax.random.fold_in(key, 0), dim), Hadamard.random(jax.random.fold_in(key, 1), dim))
        ),
    },
)


def _recipe(rotation: str):
    return lambda key, dim, bits: rqjax.Normalized(
        rqjax.Rotated(ROTATIONS[rotation](key, dim), rqjax.lloyd_max(dim, bits))
    )


RECIPES = Registry("rotation", {name: _recipe(name) for name in ROTATIONS})


def run(point: dict[str, Any]) -> dict[str, Any]:
    name = point["rotation"]
    known = published.ROTATIONS.get(name, {}) if (point["dim"], point["bits"]) == (128, 3) else {}
    return {**distortion(name, RECIPES[name], point), "reference": known.get(point["data"])}


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    return [plots.bars(rows, folder / "mse.png", x="data", y="mse", series="rotation")]
