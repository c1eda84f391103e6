"""Plots beside the tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.harness.table import Row

WORDS = {
    "tokens": "tokens in the cache",
    "vs_bfloat16": "speed over a plain bfloat16 cache",
    "vs_float32": "speed over a plain float32 cache",
    "over_shannon": "squared error over Shannon's bound",
    "stored_bits": "bits a number, the norm included",
    "mse": "squared error, relative",
    "bytes": "bytes a vector",
    "1@1": "nearest neighbours found first (1@1)",
    "10@10": "of the ten nearest, among ten found (10@10)",
    "queries_per_second": "queries a second",
    "kl": "KL divergence, nats",
    "divergence": "KL divergence of the next token, nats",
    "recalled": "share of values recalled exactly",
    "pairs": "pairs of key and value",
    "score": "share of the answers in the replies",
    "ratio": "compression, times smaller",
    "quantize_s": "seconds to quantize",
    "dequantize_s": "seconds to get back",
    "mae": "mean absolute error",
    "thousands": "thousands of vectors a second",
}
"""Labels of axes, in words and units."""
DOUBLING = ("tokens", "ratio", "pairs")
"""Axes whose values double from one to the next."""
SPREAD = ("thousands",)
"""Axes whose values go through powers of ten; nothing lies between points, which are therefore not joined."""
STYLES = [(color, line) for line in ("-", "--", ":") for color in plt.get_cmap("tab10").colors]  # pyright: ignore[reportAttributeAccessIssue]
BARS = plt.get_cmap("tab10").colors  # pyright: ignore[reportAttributeAccessIssue]


def curves(
    rows: Sequence[Row],
    path: Path,
    *,
    x: str,
    y: str,
    series: str,
    panel: str | None = None,
    log: bool = False,
    levels: dict[str, float] | None = None,
    width: int = 3,
) -> Path:
    """Plots a line for each value of `series` in a panel for each value of `panel`; named levels are gray."""
    merged = [{**row["point"], **row["metrics"]} for row in rows]
    panels = list(dict.fromkeys(row[panel] for row in merged)) if panel else [None]
    names = list(dict.fromkeys(row[series] for row in merged))
    figure, axes = _grid(len(panels), min(width, len(panels)))
    for axis, value in zip(axes, panels, strict=False):
        shown = [row for row in merged if panel is None or row[panel] == value]
        for name, (color, line) in zip(names, STYLES, strict=False):
            joined = "none" if x in SPREAD else line
            _line(axis, [row for row in shown if row[series] == name], x, y, color=color, linestyle=joined, label=name)
        for (name, height), line in zip((levels or {}).items(), ("-", "--"), strict=False):
            axis.axhline(height, color="0.6", linestyle=line, label=name)
        axis.set_yscale("log" if log else "linear")
        if x in DOUBLING:
            axis.set_xscale("log", base=2)
        if x in SPREAD:
            axis.set_xscale("log", subs=[])
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        if x in DOUBLING + SPREAD:
            axis.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,.0f}"))
        axis.set(title=value or "", xlabel=WORDS.get(x, x), ylabel=WORDS.get(y, y))
    return _save(figure, axes, path)


def _line(axis: Any, rows: Sequence[dict[str, Any]], x: str, y: str, **style: Any) -> None:
    if points := sorted({(row[x], row[y]) for row in rows}):
        axis.plot(*zip(*points, strict=True), marker="." if len(points) < 20 else "", linewidth=1.2, **style)


def bars(rows: Sequence[Row], path: Path, *, x: str, y: str, series: str) -> Path:
    """Plots groups of bars on a logarithmic axis, one group for each value of `x`."""
    merged = [{**row["point"], **row["metrics"]} for row in rows]
    groups = list(dict.fromkeys(row[x] for row in merged))
    names = list(dict.fromkeys(row[series] for row in merged))
    figure, axes = _grid(1, 1, size=(2 + 1.6 * len(groups), 4))
    for i, name in enumerate(names):
        heights = {row[x]: (row[y], row.get(f"{y}_sd") or 0) for row in merged if row[series] == name}
        places = np.array([groups.index(group) for group in heights]) + (i - len(names) / 2) * 0.8 / len(names)
        means, deviations = zip(*heights.values(), strict=True)
        axes[0].bar(places, means, 0.8 / len(names), yerr=deviations, label=name, color=BARS[i % len(BARS)])
    axes[0].set_xticks(range(len(groups)), [group.replace("_", "\n") for group in groups])
    axes[0].set(yscale="log", ylabel=WORDS.get(y, y))
    return _save(figure, axes, path)


def _grid(count: int, width: int, size: tuple[float, float] | None = None):
    height = -(-count // width)
    size = size or (4.2 * width, 3.4 * height)
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.ravel()[count:]:
        axis.set_visible(False)
    return figure, list(axes.ravel())


def _save(figure: Any, axes: Sequence[Any], path: Path) -> Path:
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    legend = figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small", frameon=False)
    missing = max(legend.get_window_extent().width / figure.dpi - 1, 0)  # the figure has an inch for it
    figure.set_size_inches(figure.get_figwidth() + missing, figure.get_figheight())
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path
