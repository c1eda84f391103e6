"""Plots: labels at lines, error bars, published points, colors of families; committed rows can be drawn again."""

import itertools
import shutil
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

import rqjax
from experiments import plots as command
from experiments.codes import distortion, inner_product
from experiments.harness import plot, table
from experiments.language import perplexity
from experiments.stale import RESULTS
from rqjax import theory


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, kept open."""
    kept, close = [], plot.plt.close
    monkeypatch.setattr(plot.plt, "close", kept.append)
    yield kept
    for figure in kept:
        close(figure)


def row(**values):
    return {"point": values, "metrics": {}}


def labels(axis):
    return {text.get_text(): text for text in axis.texts}


def assert_labels_are_apart(figure):
    """Asserts that no label is on another one of any panel, or cut off."""
    boxes = [text.get_window_extent() for axis in figure.axes for text in axis.texts]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    width, height = figure.get_size_inches() * figure.dpi
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)


def bars(axis):
    """Returns ends of the error bars: (x, low, high)."""
    segments = [part for collection in axis.collections for part in collection.get_segments()]
    return {(round(float(x), 6), round(float(low), 6), round(float(high), 6)) for (x, low), (_, high) in segments}


def stars(axis):
    return [tuple(line.get_xydata()[0].tolist()) for line in axis.lines if line.get_marker() == "*"]


def test_labels_of_near_ends_are_apart(figures, tmp_path):
    """Sixteen lines that end at nearly the same place are told apart, each beside its end."""
    names = [f"eden_{i}" for i in range(16)]
    rows = [row(bits=b, kl=4.0**-b * (1 + 0.01 * i), method=name) for i, name in enumerate(names) for b in (1, 2, 3)]
    path = plot.curves(rows, tmp_path / "a.png", x="bits", y="kl", series="method", log=True)
    (figure,) = figures
    (axis,) = figure.axes
    assert set(labels(axis)) == set(names)
    assert_labels_are_apart(figure)
    ends = {name: axis.transData.transform(text.xy) for name, text in labels(axis).items()}
    boxes = {name: text.get_window_extent() for name, text in labels(axis).items()}
    away = [abs((box.y0 + box.y1) / 2 - ends[name][1]) / box.height for name, box in boxes.items()]
    assert max(away) < 8
    assert Image.open(path).size == (1200, round(150 * (1 + 0.22 * 16)))


def test_bars_stars_and_lines(figures, tmp_path):
    rows = [
        row(bits=1, mse=0.36, mse_sd=0.01, published=0.37, method="eden"),
        row(bits=2, mse=0.1, mse_sd=0.2, method="eden"),  # its bar reaches below 0
        row(bits=2, mse=0.2, method="faiss_eden"),
    ]
    lines = {"bound": lambda x, shown: 4**-x * len(shown)}
    style: dict[str, Any] = {
        "x": "bits",
        "y": "mse",
        "series": "method",
        "log": True,
        "published": "published",
        "lines": lines,
    }
    plot.curves(rows, tmp_path / "a.png", note="bars: over draws", front=True, **style)
    (axis,) = figures[0].axes
    assert bars(axis) == {(1, 0.35, 0.37), (2, -0.1, 0.3)}
    assert stars(axis) == [(1, 0.37)]
    low, high = axis.get_ylim()
    assert 0.02 < low < 0.1 < 0.37 < high  # the bar that has no end on a logarithmic axis does not stretch it
    assert set(labels(axis)) == {"eden", "faiss_eden", "bound"}
    (bound,) = (line for line in axis.lines if len(line.get_xdata()) == 50)
    np.testing.assert_allclose(bound.get_ydata(), 3 * 4.0 ** -bound.get_xdata())
    (front,) = (line for line in axis.lines if line.get_linestyle() == "--" and len(line.get_xdata()) == 6)
    assert front.get_ydata().tolist()[1:] == [0.36, 0.36, 0.1, 0.1, 0.1]
    note = figures[0].get_supxlabel()
    assert note == "bars: over draws; gray: others' methods and baselines; stars: published; dotted: Pareto front"


def test_a_family_has_one_color_and_rivals_are_gray_and_hollow(figures, tmp_path):
    families = {"eden_3": "eden", "klt_trellis_2": "klt_trellis:tight", "turboquant_trellis": "trellis_8"}
    assert all(plot.color(one) == plot.color(other) != plot.GRAY for one, other in families.items())
    assert len({plot.color(name) for name in (*families, "klt_trellis+pre_rope", "nested_e8", "turboquant")}) == 6
    rivals = ("faiss_eden", "kivi", "kvarn", "q4_0", "nvfp4", "mxfp4", "float8", "v2_lean", "v3", "hadamard_int4")
    assert {plot.color(name) for name in (*rivals, "rotorquant_paper", "turbovec", "oscar")} == {plot.GRAY}
    rows = [row(bits=b, kl=1 / b, method=name) for name in ("kivi", "kvarn", "eden") for b in (1, 2)]
    plot.curves(rows, tmp_path / "a.png", x="bits", y="kl", series="method")
    drawn = {to_hex(line.get_color()): line for line in figures[0].axes[0].lines if len(line.get_xdata()) == 2}
    assert drawn[to_hex(plot.GRAY)].get_markerfacecolor() == "white"
    assert drawn[plot.color("eden")].get_markerfacecolor() == plot.color("eden")
    markers = [line.get_marker() for line in figures[0].axes[0].lines if line.get_color() == plot.GRAY]
    assert len({*markers} - {"None", ""}) == 2


def test_dots(figures, tmp_path):
    rows = [row(data=d, kl=k, kl_sd=k / 4, method=m, published=2 * k) for d in "ab" for m, k in (("x", 1), ("eden", 3))]
    plot.dots(rows, tmp_path / "a.png", x="kl", series="method", panel="data", published="published")
    first, second = figures[0].axes
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["x", "eden"]
    assert [tick.get_text() for tick in second.get_yticklabels()] == ["", ""]
    assert stars(second) == [(2, 0), (6, 1)]
    (low, high), _ = ([x for x, _ in part] for bars in first.collections for part in bars.get_segments())
    assert (low, high) == (0.75, 1.25)


STRATEGIES = {
    **{"float8": 8, "q8_0": 8.5, "q4_0": 4.5, "nvfp4": 4.5, "mxfp4": 4.25, "hadamard_int4": 4.5, "v2_lean": 4.5},
    **{"kivi_4": 5, "kivi_2": 3, "kvarn_4": 4.562, "kvarn_2": 2.562, "oscar_2": 2.5},
    **{f"v3_{bits}": bits + 0.25 for bits in (4, 3, 2)},
    **{f"rotorquant_{bits}": bits + 0.25 for bits in (4, 3)},
    **{f"eden_{bits}": bits + 0.25 for bits in (4, 3, 2)},
    **{f"nested_e8_{bits}": bits + 0.5 for bits in (4, 3, 2)},
    **{f"turboquant_trellis_{bits:g}": bits + 0.25 for bits in (4, 3, 2.5, 2, 1.5, 1)},
    **{"eden_3+turned": 3.25, "eden_2+turned": 2.25, "turboquant_trellis_2+turned": 2.25},
    **{"klt_trellis_2": 2.25, "klt_trellis_3+pre_rope": 3.25, "klt_trellis_2+pre_rope": 2.25},
    "klt_trellis_1/klt_trellis_2+pre_rope": 1.75,
}
"""Stored bits of strategies with heads of 64 dimensions."""


def test_leaderboard_of_a_real_model(figures, tmp_path):
    """All strategies are labeled, and each kind of exact tokens has a file of its own."""
    factors = np.exp(np.random.default_rng(0).normal(size=(2, len(STRATEGIES))))
    rows = [
        {
            "point": {"model": "smollm2-135m", "keep": keep, "strategy": name},
            "metrics": {"kl": 4.0**-bits * factor, "kl_sd": 0.3 * factor * 4.0**-bits, "bits": bits},
        }
        for keep, part in zip(("128+4", "0+4"), factors, strict=True)
        for (name, bits), factor in zip(STRATEGIES.items(), part.tolist(), strict=True)
    ]
    assert [path.name for path in perplexity.plot(rows, tmp_path)] == ["kl.png", "kl_0+4.png"]
    for figure, note in zip(figures, ("newest 128 and first 4 tokens exact", "first 4 tokens exact"), strict=True):
        (axis,) = figure.axes
        assert axis.get_title() == "smollm2-135m"
        assert figure.get_supxlabel().startswith(f"{note}; bars: deviation over windows")
        assert_labels_are_apart(figure)
        assert set(labels(axis)) == {
            *("float8", "q8_0", "q4_0", "nvfp4", "mxfp4", "hadamard_int4", "kivi", "kvarn", "v2_lean", "v3"),
            *("rotorquant", "eden", "eden+turned", "nested_e8", "turboquant_trellis", "turboquant_trellis+turned"),
            *("oscar", "klt_trellis", "klt_trellis+pre_rope", "klt_trellis_1/klt_trellis_2+pre_rope"),
        }
        assert len(bars(axis)) == len(STRATEGIES)


def test_parts_have_bits_of_codes_and_a_level_of_bfloat16(figures, tmp_path):
    kept = {"model": "m", "keep": "128+4"}
    strategies = {"bfloat16": 16, "eden_2": 2.25, "eden_2/bfloat16+turned": 9.125, "float32/v3_2.5": 17.375}
    rows = [
        {"point": {**kept, "strategy": name}, "metrics": {"bits": bits, "kl": 0.1 / (i + 1)}}
        for i, (name, bits) in enumerate(strategies.items())
    ]
    perplexity.plot(rows, tmp_path)
    shown = {axis.get_title(): axis for axis in figures[0].axes if axis.get_visible()}
    assert {title: sorted(labels(axis)) for title, axis in shown.items()} == {
        "m": ["bfloat16", "eden"],
        "m, keys alone": ["bfloat16", "eden+turned"],
        "m, values alone": ["bfloat16", "v3, mixed"],
    }
    ends = [
        labels(axis)[name].xy for axis, name in zip(shown.values(), ("eden", "eden+turned", "v3, mixed"), strict=True)
    ]
    assert ends == [(2.25, 0.05), (2.25, pytest.approx(0.1 / 3)), (2.75, 0.025)]
    assert all(labels(axis)["bfloat16"].xy[1] == 0.1 for axis in shown.values())


def test_a_method_from_outside_is_drawn(figures, tmp_path, monkeypatch):
    monkeypatch.setitem(rqjax.METHODS, "mine", rqjax.eden)
    many = command.rows(RESULTS / "distortion" / "rows.csv")
    eden = [one for one in many if one["point"]["method"] == "eden"]
    mine = [{part: values | {"method": "mine"} for part, values in one.items()} for one in eden]
    distortion.plot(many + mine, tmp_path)
    distortion.plot([one for one in many if one["point"]["method"] in ("eden", "hadamard")], tmp_path)
    assert {"mine", "eden"} <= set(labels(figures[0].axes[0]))
    assert {"hadamard", "eden"} <= set(labels(figures[1].axes[0]))


def test_distortion_lies_between_the_bounds(figures, tmp_path):
    """TurboQuant's errors on the sphere are above Shannon's bound and below Theorem 1's, as both are drawn.

    Points of data with a dimension of their own have 0 in its place.
    """
    rows = command.rows(RESULTS / "distortion" / "rows.csv")
    distortion.plot([one | {"point": one["point"] | {"dim": 0}} for one in rows], tmp_path)
    axis = next(axis for axis in figures[0].axes if axis.get_title() == "sphere")
    assert {"Shannon", "TurboQuant's Theorem 1", "turboquant"} <= set(labels(axis))
    low, high = (line.get_xydata() for line in axis.lines if len(line.get_xdata()) == 50)
    for one in rows:
        point, metrics = one["point"], one["metrics"]
        if (point["data"], point["method"]) == ("sphere", "turboquant"):
            bits, mse = metrics["stored_bits"], metrics["mse"]
            assert theory.shannon_bound(bits) < mse < theory.mse_bound(point["bits"])
            for line, value in ((low, theory.shannon_bound(bits)), (high, theory.mse_bound(point["bits"]))):
                assert np.interp(bits, line[:, 0], np.log(line[:, 1])) == pytest.approx(np.log(value))
    assert (1.125, 0.361) in stars(axis)


def test_committed_rows_are_drawn_again(tmp_path):
    """Rows are read as they were written; a plot that is no longer made goes."""
    written = [{"point": {"bits": 2, "keep": "0+4"}, "metrics": {"kl": 0.5, "none": None}, "environment": {}}]
    table.write_csv(written, tmp_path / "rows.csv")
    assert command.rows(tmp_path / "rows.csv")[0]["point"] == {"bits": 2, "keep": "0+4", "kl": 0.5}
    for name, made in (("needle", ["found.png"]), ("inner_product", ["bias.png", "variance.png"])):
        folder = shutil.copytree(RESULTS / name, tmp_path / name)
        (folder / "old.png").touch()
        assert [path.name for path in command.redraw(folder)] == made
        assert sorted(path.name for path in folder.glob("*.png")) == made
        assert all(path.stat().st_size > 5000 for path in folder.glob("*.png"))


def test_shrinkage_and_published_variance(figures, tmp_path):
    inner_product.plot(command.rows(RESULTS / "inner_product" / "rows.csv"), tmp_path)
    bias, variance = figures
    assert [axis.get_title() for axis in bias.axes][:2] == ["sphere, 1-bit", "sphere, 2-bit"]
    axis = next(axis for axis in variance.axes if axis.get_title() == "sphere")
    assert {"Theorem 2", "Theorem 3"} <= set(labels(axis))
    assert (3.25, pytest.approx(128 * 0.037**2)) in stars(axis)


def test_one_definition_of_over_shannon():
    """The tables of codes agree on how far a code is from the bound at the bits that it stores."""
    found = {}
    for name, code in (("rate_distortion", "code"), ("codes_by_speed", "method")):
        for one in command.rows(RESULTS / name / "rows.csv"):
            point = one["point"]
            if point["data"] == "sphere" and point[code] in ("eden", "trellis_8", "turboquant_trellis"):
                found.setdefault((point["bits"], point[code][:1]), []).append(point["over_shannon"])
    pairs = [values for values in found.values() if len(values) == 2]
    assert len(pairs) == 6
    assert all(one == pytest.approx(other, rel=0.02) for one, other in pairs)
