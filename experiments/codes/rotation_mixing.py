"""Errors of structured data after rotations, which differ in how well they mix: isotropic data does not show it."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import rqjax
from experiments.codes.distortion import distortion
from experiments.data import samples
from experiments.harness import plot as plots, published
from experiments.harness.table import Row, Table
from rqjax.core import Registry
from rqjax.rotations import (
    Chain,
    Dense,
    Givens,
    Hadamard,
    Identity,
    Permutation,
    Quaternion,
    Rotor,
    butterfly,
)

MADE_BY = ("experiments/codes/distortion.py", "experiments/data/samples.py", "rqjax/rotations/*.py")
TABLES = (
    Table(
        "Relative mean squared error of Lloyd-Max after each rotation",
        rows=("bits", "dim", "rotation"),
        columns=("data",),
        values=("mse", "reference"),
    ),
    Table(
        "The same relative to a uniform rotation; numbers that a rotation is made of, multiply-adds for a vector",
        rows=("bits", "dim", "rotation", "parameters", "multiply_adds"),
        columns=("data",),
        values=("vs_haar",),
    ),
)


def _rounds(rotation: Any, count: int | None, permute: bool = False):
    """Chains layers, as many as there are digits of d in base 2 or 4 if `count` is None."""

    def make(key, dim):
        parts, base = [], 4 if rotation is Quaternion else 2
        for part_key in jax.random.split(key, count or math.ceil(math.log(dim, base))):
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
        "givens": Givens.random,
        "givens_chain": _rounds(Givens, None, permute=True),
        "quaternion": Quaternion.random,
        "quaternion_chain": _rounds(Quaternion, None, permute=True),
        "rotor": Rotor.random,
        "rotor_5": _rounds(Rotor, 5, permute=True),
        "rotor_10": _rounds(Rotor, 10, permute=True),
        "butterfly": butterfly,
        "butterfly_hadamard": lambda key, dim: Chain(
            (*butterfly(jax.random.fold_in(key, 0), dim).rotations, Hadamard.random(jax.random.fold_in(key, 1), dim))
        ),
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


def check(point: dict[str, Any]) -> None:
    samples.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    name = point["rotation"]
    known = published.ROTATIONS.get(name, {}) if (point["dim"], point["bits"]) == (128, 3) else {}
    result = distortion(name, RECIPES[name], point)
    rotation = jax.eval_shape(lambda key: ROTATIONS[name](key, point["dim"]), jax.random.key(0))
    return {
        **result,
        "reference": known.get(point["data"]),
        "vs_haar": result["mse"] / _dense(*(point[name] for name in ("data", "seeds", "n", "dim", "bits"))),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(rotation)),
        "multiply_adds": rotation.cost,
    }


@functools.cache
def _dense(data: str, seeds: int, n: int, dim: int, bits: int) -> float:
    """Measures the error after a uniform rotation, with which every row of a data set is compared."""
    point = {"data": data, "seeds": seeds, "n": n, "dim": dim, "bits": bits}
    return distortion("dense", RECIPES["dense"], point)["mse"]


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots the error after each rotation."""
    style: dict[str, Any] = {
        "series": "rotation",
        "panel": "data",
        "published": "reference",
        "note": "bars: deviation over draws",
    }
    return [plots.dots(rows, folder / "mse.png", x="mse", **style)]
