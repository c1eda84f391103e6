"""Fractional bits by splitting channels, beside their true number."""

import functools
from collections.abc import Callable
from typing import Any

import rqjax
from experiments.codes.distortion import distortion
from experiments.data import samples
from experiments.harness.table import Table
from experiments.harness.texts import numbers
from rqjax import lloyd_max, theory
from rqjax.rotations import Dense

MADE_BY = ("experiments/codes/distortion.py", "experiments/data/samples.py", "rqjax/codebooks/lloyd_max.py")
TABLES = (
    Table(
        "Bits split over the channels",
        rows=("split",),
        columns=(),
        values=("claimed_bits", "index_bits", "stored_bits", "mse", "expected", "lower_bound"),
        each=("data",),
    ),
)


def parse(split: str) -> list[tuple[int, ...]]:
    """Parses '32@3+96@2' as [(32, 3), (96, 2)]."""
    return [numbers(part, "64@3", f"channels and bits in the split {split!r}") for part in split.split("+")]


def check(point: dict[str, Any]) -> None:
    samples.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    shares = parse(point["split"])
    dim = sum(channels for channels, _ in shares)
    bits = sum(channels * bits for channels, bits in shares) / dim
    result = distortion(point["split"], _recipe(point["split"]), {**point, "dim": dim, "bits": bits})
    return {
        **result,
        "index_bits": bits,
        "claimed_bits": 2.5 if point["split"] == "32@3+96@2" else None,  # TurboQuant, section 4.3
        "expected": sum(channels * theory.lloyd_max(b, dim=dim) for channels, b in shares) / dim,
        "lower_bound": theory.shannon_bound(bits),
    }


@functools.cache
def _recipe(split: str) -> Callable[..., rqjax.Quantizer]:
    """Makes one recipe for a split, so that the data sets share what is compiled."""

    def recipe(key, dim, bits):
        parts = tuple(lloyd_max(channels, bits, sphere_dim=dim) for channels, bits in parse(split))
        return rqjax.Normalized(rqjax.Rotated(Dense.haar(key, dim), rqjax.Split(parts)))

    return recipe
