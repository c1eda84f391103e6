"""Draws the plots of committed tables anew from their rows: `python -m experiments.plots [TABLE ...]`; all by default.

Nothing is computed. Tables without a plot are left alone.
"""

import csv
import sys
from pathlib import Path
from typing import Any

from experiments import run
from experiments.stale import RESULTS


def rows(path: Path) -> list[dict[str, Any]]:
    """Reads a `rows.csv`: the flat rows stand for both the point and the metrics, without what is empty."""
    with path.open(newline="") as file:
        flat = [{name: _value(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
    return [{"point": row, "metrics": row, "environment": row} for row in flat]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def redraw(folder: Path) -> list[Path]:
    """Draws the plots of a table in the place of those that it has."""
    found = rows(folder / "rows.csv")
    made = run.load(found[0]["point"]["experiment"]).plot(found, folder)
    for path in {*folder.glob("*.png")} - {*made}:
        path.unlink()
    return made


if __name__ == "__main__":
    names = sys.argv[1:] or sorted({path.parent.name for path in RESULTS.glob("*/*.png")})
    for name in names:
        if not (RESULTS / name / "rows.csv").exists():
            sys.exit(f"error: there is no table {name} in {RESULTS}")
        print(*(path.relative_to(RESULTS) for path in redraw(RESULTS / name)), flush=True)
