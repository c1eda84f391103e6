"""Error of codes over Shannon's bound against the speed of encoding and of decoding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rqjax
from experiments.codes.distortion import check as check, distortion
from experiments.data import samples
from experiments.harness import plot as plots
from experiments.harness.table import Row, Table
from experiments.harness.timing import medians

MADE_BY = (
    "experiments/codes/distortion.py",
    "experiments/data/samples.py",
    "rqjax/recipes/methods.py",
    "rqjax/quantizers/scalar.py",
    "rqjax/quantizers/trellis.py",
)
TABLES = (
    Table(
        "Error over Shannon's bound at the bits that are stored, norms included; thousands of vectors a second, and how"
        " many times as fast as a copy of them",
        rows=("method", "bits"),
        columns=(),
        values=("stored_bits", "over_shannon", "encoded", "encode_vs_memcpy", "decoded", "decode_vs_memcpy"),
        each=("data", "dim"),
    ),
)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures the error of `n` vectors for each seed, and the speed of `timed` vectors in turns with their copy."""
    method, n = point["method"], point["timed"]
    found = distortion(method, rqjax.METHODS[method], point)
    quantizer = rqjax.METHODS[method](jax.random.key(0), point["dim"], point["bits"])
    x = samples.sample(point["data"], 1, n, point["dim"])[0]
    encode = jax.jit(lambda quantizer, x: rqjax.encode(quantizer, x))
    decode = jax.jit(lambda quantizer, codes: rqjax.decode(quantizer, codes))
    codes, array = encode(quantizer, x), np.asarray(x)
    copy = np.empty_like(array)
    functions = {
        "encode": lambda: encode(quantizer, x),
        "decode": lambda: decode(quantizer, codes),
        "memcpy": lambda: np.copyto(copy, array),
    }
    seconds = medians(functions, point["rounds"])
    return {
        **{name: found[name] for name in ("stored_bits", "over_shannon", "over_shannon_sd")},
        **{f"{name}d": n / seconds[name] / 1000 for name in ("encode", "decode")},
        **{f"{name}_vs_memcpy": seconds["memcpy"] / seconds[name] for name in ("encode", "decode")},
    }


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Plots a line for each method, with a point for each number of bits; the best are at the lower right."""
    shown = [row for row in rows if row["point"]["data"] == rows[0]["point"]["data"]]
    names = {"encode": "encoding", "decode": "decoding"}
    points = [
        {
            "point": {**row["point"], "of": names[of]},
            "metrics": {**row["metrics"], "thousands": row["metrics"][f"{of}d"]},
        }
        for of in names
        for row in shown
    ]
    style: dict[str, Any] = {
        "series": "method",
        "panel": "of",
        "mark": "bits",
        "note": "numerals: bits a number; bars: deviation over draws",
    }
    return [plots.curves(points, folder / "error_by_speed.png", x="thousands", y="over_shannon", **style)]
