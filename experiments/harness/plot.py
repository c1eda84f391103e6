"""Plots beside the tables: each series is labeled where it ends, and has error bars if its rows have `<metric>_sd`."""

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from experiments.harness.table import Row

WORDS = {
    "tokens": "tokens in the cache",
    "vs_bfloat16": "speed over a plain bfloat16 cache",
    "vs_float32": "speed over a plain float32 cache",
    "over_shannon": "squared error over Shannon's $4^{-bits}$",
    "stored_bits": "stored bits a number, norms and scales included",
    "bits": "stored bits a number, norms and scales included",
    "mse": "squared error, relative",
    "bytes": "bytes a vector",
    "1@1": "nearest neighbors found first (1@1)",
    "10@10": "of the ten nearest, among ten found (10@10)",
    "queries_per_second": "queries a second",
    "kl": "KL divergence, nats",
    "divergence": "KL divergence of the next token, nats",
    "recalled": "share of values recalled exactly",
    "pairs": "pairs of key and value",
    "found": "share of needles found",
    "context": "keys that are searched",
    "score": "share of the answers in the replies",
    "ratio": "compression, times smaller",
    "quantize_s": "seconds to quantize",
    "dequantize_s": "seconds to get back",
    "mae": "mean absolute error",
    "thousands": "thousands of vectors a second",
    "shrinkage": "shrinkage of inner products, 1 - slope",
    "d_variance": "d times the variance of the error",
}
"""Labels of axes, in words and units."""
DOUBLING = ("tokens", "ratio", "pairs", "context")
"""Axes whose values double from one to the next."""
COLORS = {
    "pre_rope": "#b30000",
    "klt_trellis": "#e6750a",
    "allocated_trellis": "#8c564b",
    "allocated": "#b08d00",
    "trellis": "#1f6fb4",
    "nested_e8": "#7b3fa0",
    "eden": "#2a8a2a",
    "rotor": "#d6409a",
    "hadamard": "#5a6b00",
    "givens": "#0f9aa8",
    "quaternion": "#7b3fa0",
    "butterfly": "#8c564b",
    "turboquant": "#0f9aa8",
    "qet_best": "#b30000",
    "qet_vanilla": "#0f9aa8",
    "qet": "#1f6fb4",
}
"""Colors of families, in all plots: that of the first key that is part of a name. All others are gray."""
OTHERS = ("faiss", "rotorquant_paper", "v2", "v3", "hadamard_int4")
"""Beginnings of names of others' codecs and formats, which are gray, whatever their names hold."""
GRAY = "0.4"
HOLLOW = "os^Dv<>pPhd8"
"""Markers that tell gray series apart."""
WIDTH = 8.0
"""Inches; a figure that is shown 800 pixels wide has text of 11 pixels and more."""
SMALL = 8
plt.rcParams |= {
    "figure.dpi": 150,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def color(name: str) -> str:
    """Returns the color of a series' family; gray for what others have made, and for baselines."""
    if name.startswith(OTHERS):
        return GRAY
    return next((color for part, color in COLORS.items() if part in name), GRAY)


def curves(
    rows: Sequence[Row],
    path: Path,
    *,
    x: str,
    y: str,
    series: str,
    panel: str | None = None,
    log: bool = False,
    published: str = "",
    mark: str = "",
    lines: Mapping[str, Callable[[float, Any], float]] | None = None,
    front: bool = False,
    note: str = "",
) -> Path:
    """Plots a line for each value of `series` in a panel for each value of `panel`.

    Stars are the values of the metric `published`. Points show the value of `mark`, if it is given. `lines` are gray
    functions of x and of the rows of a panel. `front` draws the least y for as much x or less. `note` says what the
    error bars are over.
    """
    merged = [{**row["point"], **row["metrics"]} for row in rows]
    panels = list(dict.fromkeys(row[panel] for row in merged)) if panel else [None]
    styles = _styles(list(dict.fromkeys(row[series] for row in merged)))
    most = max(len({row[series] for row in merged if panel is None or row[panel] == value}) for value in panels)
    columns = min(2 if most < 15 else 1, len(panels))
    height = max(3.6, 1 + 0.22 * most)
    figure, axes = _grid(len(panels), columns, height)
    for axis, value in zip(axes, panels, strict=True):
        shown = [row for row in merged if panel is None or row[panel] == value]
        axis.set_yscale("log" if log else "linear", **({"nonpositive": "clip"} if log else {}))
        _ticks(axis.yaxis, log)
        if x in (*DOUBLING, "thousands"):
            axis.set_xscale("log", base=2 if x in DOUBLING else 10)
            _ticks(axis.xaxis, x == "thousands")
        for name, style in styles.items():
            _series(axis, name, style, [row for row in shown if row[series] == name], x, y, published, mark)
        ends = np.array(axis.get_xlim())
        xs = (np.geomspace if axis.get_xscale() == "log" else np.linspace)(ends[0], ends[1], 50)
        drawn: list[float] = []
        for label, function in (lines or {}).items():
            axis.plot(xs, ys := [function(float(at), shown) for at in xs], color="0.6", linewidth=1, zorder=1)
            _label(axis, label, (xs[-1], ys[-1]), "0.45")
            drawn += [ys[0], ys[-1]]
        if log:  # a bar that reaches 0 has no end there
            values = [row[key] for row in shown for key in (y, published) if row.get(key) is not None]
            values = [value for value in [*values, *drawn] if value > 0]
            axis.set_ylim(min(values) / 1.8, max(values) * 1.8)
        if front:
            _front(axis, shown, x, y)
        axis.set(title=value or "", xlim=ends)
    notes = [note, *_notes(styles, merged, published), "dotted: Pareto front" if front else ""]
    return _save(figure, axes, path, columns, WORDS.get(x, x), WORDS.get(y, y), notes)


def dots(
    rows: Sequence[Row],
    path: Path,
    *,
    x: str,
    series: str,
    panel: str,
    log: bool = True,
    published: str = "",
    note: str = "",
) -> Path:
    """Plots a line with a dot for each value of `series` in a panel for each value of `panel`."""
    merged = [{**row["point"], **row["metrics"]} for row in rows]
    panels = list(dict.fromkeys(row[panel] for row in merged))
    styles = _styles(list(dict.fromkeys(row[series] for row in merged)))
    columns = min(4, len(panels))
    figure, axes = _grid(len(panels), columns, 0.8 + 0.2 * len(styles))
    for i, (axis, value) in enumerate(zip(axes, panels, strict=True)):
        for place, (name, style) in enumerate(styles.items()):
            for row in (row for row in merged if row[panel] == value and row[series] == name):
                axis.errorbar(row[x], place, xerr=row.get(f"{x}_sd"), **style, capsize=2)
                if row.get(published) is not None:
                    axis.plot(row[published], place, **_star(style))
        axis.set(xscale="log" if log else "linear", title=textwrap.fill(str(value).replace("_", " "), 20))
        _ticks(axis.xaxis, log)
        axis.set_yticks(range(len(styles)), list(styles) if i % columns == 0 else [""] * len(styles))
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", color="0.9", linewidth=0.8)
        axis.set_ylim(len(styles) - 0.5, -0.5)
    return _save(figure, axes, path, columns, "", "", [WORDS.get(x, x), note, *_notes(styles, merged, published)])


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns how each series is drawn: rivals have hollow markers, and kin have other strokes."""
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        kin = sum(style["color"] == color(name) for style in styles.values())
        styles[name] = {"color": color(name), "linewidth": 1.3, "markersize": 4, "elinewidth": 0.8, "marker": "o"}
        if color(name) == GRAY:
            hollow = {"marker": HOLLOW[kin % len(HOLLOW)], "markerfacecolor": "white", "linewidth": 0.9, "zorder": 1.5}
            styles[name] |= hollow
        else:
            styles[name]["linestyle"] = ("-", "--", ":", "-.")[kin % 4]
    return styles


def _notes(styles: dict[str, dict[str, Any]], rows: Sequence[dict[str, Any]], published: str) -> list[str]:
    gray = {style["color"] == GRAY for style in styles.values()} == {True, False}
    stars = any(row.get(published) is not None for row in rows)
    return ["gray: others' methods and baselines"] * gray + ["stars: published"] * stars


def _star(style: dict[str, Any]) -> dict[str, Any]:
    return {"marker": "*", "markersize": 9, "color": style["color"], "markerfacecolor": "white", "linestyle": "none"}


def _series(axis: Any, name: str, style: dict[str, Any], rows: list[Any], x: str, y: str, published: str, mark: str):
    rows = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    if not rows:
        return
    rows = rows if mark else sorted(rows, key=lambda row: row[x])
    xs, ys = ([row[key] for row in rows] for key in (x, y))
    bars = [row.get(f"{y}_sd") or 0 for row in rows]
    marker = {"marker": "none"} if mark or len(rows) > 20 else {}
    axis.errorbar(xs, ys, yerr=bars if any(bars) else None, **style | marker)
    numeral = {"color": style["color"], "markersize": 6, "markeredgewidth": 0.3, "zorder": 3}
    for row in rows if mark else []:
        axis.plot(row[x], row[y], marker=f"${row[mark]:g}$", **numeral)
    for row in rows if published else []:
        if row.get(published) is not None:
            axis.plot(row[x], row[published], **_star(style), zorder=3)
    _label(axis, name, (xs[-1], ys[-1]), style["color"])


def _label(axis, text: str, point: tuple[float, float], color: str) -> None:
    """Writes a label to the right of its point; `_apart` moves it."""
    halo = [withStroke(linewidth=2, foreground="white")]
    style: dict[str, Any] = {"va": "center", "color": color, "fontsize": SMALL, "path_effects": halo}
    axis.annotate(text, point, (5, 0), textcoords="offset points", annotation_clip=False, **style)


def _front(axis, rows: list[dict[str, Any]], x: str, y: str) -> None:
    points = sorted((row[x], row[y]) for row in rows)
    best = np.minimum.accumulate([value for _, value in points])
    xs = np.repeat([at for at, _ in points], 2)
    ys = np.concatenate([axis.get_ylim()[1:], np.repeat(best, 2)[:-1]])
    axis.plot(xs, ys, color="0.2", linewidth=0.8, linestyle=(0, (1, 1.5)), zorder=1)


def _ticks(axis, log: bool) -> None:
    """Writes numbers without powers where they are short: 0.001, 1,000, 1e-6."""
    axis.set_major_formatter(FuncFormatter(lambda number, _: _number(number)))
    if log:
        axis.set_minor_formatter(NullFormatter())


def _number(number: float) -> str:
    if 0 < abs(number) < 1e-4:
        return f"{number:g}".replace("e-0", "e-")
    return f"{number:,.0f}" if abs(number) >= 1000 else np.format_float_positional(number, 6, trim="-")


def _grid(count: int, width: int, height: float):
    lines = -(-count // width)
    figure, axes = plt.subplots(lines, width, figsize=(WIDTH, height * lines), squeeze=False, layout="constrained")
    for axis in axes.ravel()[count:]:
        axis.set_visible(False)
    return figure, list(axes.ravel()[:count])


def _save(
    figure: Any, axes: Sequence[Any], path: Path, columns: int, xlabel: str, ylabel: str, notes: list[str]
) -> Path:
    xlabel = textwrap.fill(xlabel, 60 if columns == 1 else 28)
    for i, axis in enumerate(axes):
        axis.set(xlabel=xlabel if i + columns >= len(axes) else "", ylabel=ylabel if i % columns == 0 else "")
        for one in (axis.xaxis, axis.yaxis):  # a log axis of less than two decades has ticks at 2 and 5, too
            low, high = one.get_view_interval()
            if one.get_scale() == "log" and isinstance(one.get_minor_formatter(), NullFormatter) and high < 150 * low:
                subs = (1, 2, 5) if high < 40 * low else (1, 3)
                one.set_major_locator(LogLocator(subs=subs) if high > 4 * low else MaxNLocator(3))
    text = textwrap.fill("; ".join(filter(None, notes)), 128)
    figure.supxlabel(text, fontsize=SMALL, color="0.35")
    figure.canvas.draw()
    figure.set_layout_engine("none")
    for axis in axes:
        _apart(figure, axis)
    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    palette = image.quantize(method=Image.Quantize.FASTOCTREE)  # a fourth of the bytes; others mix rare colors
    palette.save(path, optimize=True)
    plt.close(figure)
    return path


def _apart(figure: Any, axis: Any) -> None:
    """Moves labels up, down and aside until none is on another, nor more than need be on lines."""
    axis.autoscale(False)
    unit, frame = figure.dpi / 72, axis.get_window_extent()
    taken, placed = _inked(axis), []
    right = max((text.get_window_extent().x1 for text in axis.texts), default=0)  # what the layout has room for
    for label in sorted(axis.texts, key=lambda text: -axis.transData.transform(text.xy)[1]):
        box, (x, y) = label.get_window_extent(), axis.transData.transform(label.xy)
        found = []
        for step, gap in ((step, gap) for step in itertools.count() for gap in (5, 20, -5, -20)):
            dy = (step + 1) // 2 * (1 if step % 2 else -1) * box.height / 4
            if found and abs(dy) > min(found)[0]:
                break
            start = x + gap * unit - (box.width if gap < 0 else 0)
            spot = (start, y + dy - box.height / 2, start + box.width, y + dy + box.height / 2)
            if start < frame.x0 or spot[2] > right or any(_overlap(spot, other) for other, _ in placed):
                continue
            inside = (taken > np.array(spot[:2]) - 1).all(axis=1) & (taken < np.array(spot[2:]) + 1).all(axis=1)
            outside = max(0, frame.y0 - spot[1], spot[3] - frame.y1)
            crossed = sum(abs(x - at) < box.height and other[1] < spot[1] for other, at in placed)
            away = box.height * ({5: 0, -5: 0.6, 20: 1.2, -20: 1.6}[gap] + crossed)
            found.append((abs(dy) + away + 3 * unit * inside.sum() + 5 * outside, gap, dy, spot))
        _, gap, dy, spot = min(found)
        placed.append((spot, x))
        label.set(position=(gap, dy / unit), ha="left" if gap > 0 else "right")
        if abs(dy) > 0.7 * box.height or abs(gap) > 5:
            ends = axis.transData.inverted().transform([(x, y), (spot[0 if gap > 0 else 2], y + dy)])
            axis.plot(*ends.T, color=label.get_color(), linewidth=0.5, alpha=0.6, clip_on=False, zorder=1)


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _inked(axis: Any) -> np.ndarray:
    """Returns pixels (n, 2) on lines, markers and error bars, some three apart."""
    paths = [line.get_transform().transform(line.get_xydata()) for line in axis.lines]
    paths += [axis.transData.transform(part) for bars in axis.collections for part in bars.get_segments()]
    spots = [np.zeros((0, 2))]
    for path in paths:
        spots.append(path)
        for a, b in itertools.pairwise(path):
            spots.append(a + (b - a) * np.linspace(0, 1, 2 + int(np.hypot(*(b - a)) / 3))[:, None])
    return np.concatenate(spots)
