"""Distance of codes of equal length from Shannon's bound: error times 4^b, which is 1 there."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

from experiments.codes.distortion import distortion
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
        "Mean squared error over Shannon's bound 4^-b, b the bits without the norm",
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
    result = distortion(code, recipe, point) if recipe else {"mse": codebooks.entropy_coded(bits), "stored_bits": bits}
    result["over_shannon"] = result["mse"] * 4**bits
    if result.get("mse_sd") is not None:
        result["over_shannon_sd"] = result["mse_sd"] * 4**bits
    return result


SHOWN = ("lloyd_max", "entropy_coded", "trellis_6", "trellis_8", "trellis_12")
"""Codes in the plot, for the first of the data sets, which differ little."""


def _as_good_as_any(point: dict[str, Any]) -> bool:
    """Returns False for levels of fractional bits: they are two codes side by side, each better alone."""
    return float(point["bits"]).is_integer() or point["code"].startswith(("trellis", "entropy"))


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    first = [row for row in rows if row["point"]["data"] == rows[0]["point"]["data"]]
    rows = [row for row in first if row["point"]["code"] in SHOWN and _as_good_as_any(row["point"])]
    style = {"series": "code", "levels": {"Shannon's bound": 1}}
    return [plots.curves(rows, folder / "over_shannon.png", x="stored_bits", y="over_shannon", **style)]
