"""Distance of codes of equal length from Shannon's bound: error times 4^b, b the bits that are stored."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

from experiments.codes.distortion import distortion, over_shannon
from experiments.data import samples
from experiments.harness import plot as plots
from experiments.harness.table import Row, Table
from rqjax import codebooks, turboquant_mixed
from rqjax.codebooks.trellis_tables import STATE_BITS
from rqjax.core import Quantizer, Registry
from rqjax.quantizers.combinators import Rotated, Scaled
from rqjax.quantizers.scalar import lloyd_max
from rqjax.quantizers.trellis_per_coordinate import trellis_coded
from rqjax.recipes.methods import mixed
from rqjax.rotations import Dense

MADE_BY = (
    "experiments/codes/distortion.py",
    "experiments/data/samples.py",
    "rqjax/codebooks/*.py",
    "rqjax/codebooks/*.npz",
)
TABLES = (
    Table(
        "Mean squared error over Shannon's bound 4^-b, b the bits that are stored, norms included",
        rows=("code",),
        columns=("bits",),
        values=("over_shannon",),
        each=("data", "dim"),
    ),
    Table("Mean squared error", rows=("code",), columns=("bits",), values=("mse", "stored_bits"), each=("data", "dim")),
)


def scaled(make: Callable[..., Quantizer], key: Array, dim: int, bits: float) -> Quantizer:
    """Makes a quantizer of the best scale, a uniform rotation, and what `make` returns for as many bits."""
    return Scaled(Rotated(Dense.haar(key, dim), make(dim, bits)))


CODES: Registry = Registry(
    "code",
    {
        "lloyd_max": turboquant_mixed,
        "eden": functools.partial(scaled, functools.partial(mixed, lloyd_max)),
        "entropy_coded": None,
        **{
            f"trellis_{size}": functools.partial(scaled, functools.partial(trellis_coded, state_bits=size))
            for size in range(STATE_BITS[1][0], STATE_BITS[1][1] + 1)
        },
    },
)
"""Functions that make quantizers; None for a curve from theory."""


def check(point: dict[str, Any]) -> None:
    recipe = CODES[point["code"]]
    if recipe:
        jax.eval_shape(lambda key: recipe(key, point["dim"], point["bits"]), jax.random.key(0))
    samples.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    code, bits = point["code"], point["bits"]
    recipe = CODES[code]
    if recipe:
        return distortion(code, recipe, point)
    stored = bits + 16 / point["dim"]  # with a norm as the others have
    return {"mse": (mse := codebooks.entropy_coded(bits)), "stored_bits": stored, **over_shannon(stored, mse)}


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots the codes of the first of the data sets, which differ little.

    Levels of fractional bits are left out: they are two codes side by side, each better alone.
    """
    codes = ("lloyd_max", "eden", "entropy_coded", "trellis_6", "trellis_8", "trellis_12")
    shown = [
        row
        for row in rows
        if row["point"]["data"] == rows[0]["point"]["data"]
        and row["point"]["code"] in codes
        and (float(row["point"]["bits"]).is_integer() or row["point"]["code"].startswith(("trellis", "entropy")))
    ]
    norm = 4 ** (16 / rows[0]["point"]["dim"])
    lines = {"Shannon's bound": lambda *_: 1, "bound and a norm of 16 bits": lambda *_: norm}
    style: dict[str, Any] = {"series": "code", "lines": lines, "note": "bars: deviation over draws"}
    return [plots.curves(shown, folder / "over_shannon.png", x="stored_bits", y="over_shannon", **style)]
