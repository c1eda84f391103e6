"""Tables in markdown and CSV, derived from rows."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Table(NamedTuple):
    """What a table shows: one line for each value of `rows`, a group of columns for each value of `columns`.

    Every name is a key of a point or of its metrics. A value with a companion `<name>_sd` is shown with its deviation;
    `footers` are metrics that depend on the column only, and each becomes a line at the end.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[str, ...]
    footers: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    """One table for each value of these."""
    having: str | None = None
    """Only rows that have this."""


def flat(row: Row) -> Row:
    """A row without its nesting; scalars only."""
    merged = {**row["point"], **row["metrics"], **row["environment"], **row["metrics"]}  # metrics win, `seconds` too
    return {name: value for name, value in merged.items() if not isinstance(value, list | dict)}


def render(rows: Sequence[Row], tables: Sequence[Table]) -> str:
    """The tables in markdown."""
    parts = []
    for table in tables:
        records = [row for row in map(flat, rows) if table.having is None or row.get(table.having) is not None]
        for place in dict.fromkeys(_pick(record, table.each) for record in records):
            part = [record for record in records if _pick(record, table.each) == place]
            title = ": ".join(filter(None, [table.title, _place(table.each, place)]))
            parts.append(_render(part, table._replace(title=title)))
    return "\n".join(parts)


def _pick(row: Row, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in names)


def _place(names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """'sphere, 128 dim'."""
    pairs = zip(names, values, strict=True)
    return ", ".join(v if isinstance(v, str) else f"{_text(v)} {name}" for name, v in pairs)


def _render(rows: list[Row], table: Table) -> str:
    lines = list(dict.fromkeys(_pick(row, table.rows) for row in rows))
    groups = list(dict.fromkeys(_pick(row, table.columns) for row in rows))
    cells = {(_pick(row, table.rows), _pick(row, table.columns)): row for row in rows}

    def used(group, value):
        return any(row.get(value) is not None for row in rows if _pick(row, table.columns) == group)

    columns = [(group, value) for group in groups for value in table.values if used(group, value)]

    def title(group: tuple[Any, ...], value: str) -> str:
        place = _place(table.columns, group)
        return ", ".join(filter(None, [place, value if len(table.values) > 1 or not place else ""])).replace("_", " ")

    body = [[*map(_text, line), *(_cell(cells.get((line, g)), v) for g, v in columns)] for line in lines]
    for footer in table.footers:
        some = {
            g: next((r for r in rows if _pick(r, table.columns) == g and r.get(footer) is not None), None)
            for g in groups
        }
        shown = [_cell(some[g], footer) if v == table.values[0] else "" for g, v in columns]
        body.append([f"*{footer.replace('_', ' ')}*", *[""] * (len(table.rows) - 1), *shown])
    head = [*(name.replace("_", " ") for name in table.rows), *(title(*column) for column in columns)]
    rule = [*["---"] * len(table.rows), *["---:"] * len(columns)]
    return f"### {table.title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in [head, rule, *body])


def _cell(row: Row | None, name: str) -> str:
    if row is None or row.get(name) is None:
        return ""
    deviation = row.get(f"{name}_sd")
    return _text(row[name]) + (f" ± {_text(deviation, 2)}" if deviation is not None else "")


def _text(value: Any, digits: int = 4) -> str:
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)
    if value != 0 and not 1e-5 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}g}"
    return f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """All scalars of all rows."""
    records = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
