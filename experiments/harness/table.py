"""Tables in markdown and CSV, derived from rows."""

import csv
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Table(NamedTuple):
    """Layout of a table: one line for each value of `rows`, a group of columns for each value of `columns`.

    Every name is a key of a point or of its metrics. A value with a companion `<name>_sd` is shown with its deviation;
    `footers` are metrics that depend on the column only, and each becomes a line at the end.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[str, ...]
    footers: tuple[str, ...] = ()
    each: tuple[str, ...] = ()
    """Names for each of whose values there is a table."""
    having: str | None = None
    """Name that a row needs to be shown; None: all are."""


def flat(row: Row) -> Row:
    """A row without its nesting; scalars only."""
    merged = {**row["point"], **row["metrics"], **row["environment"], **row["metrics"]}  # metrics win, `seconds` too
    return {name: value for name, value in merged.items() if not isinstance(value, list | dict)}


def render(rows: Sequence[Row], tables: Sequence[Table], is_current: Callable[[Row], bool] = lambda row: True) -> str:
    """Renders the tables in markdown; below each stands how many rows are not of today's code."""
    return "\n".join(_markdown(part) + _stale(part, is_current) for part in _parts(rows, tables))


def show(rows: Sequence[Row], tables: Sequence[Table], is_current: Callable[[Row], bool] = lambda row: True) -> str:
    """Renders the tables for a terminal: groups of columns that do not fit side by side stand below each other."""
    return "\n".join(_plain(part, width()) + _stale(part, is_current) for part in _parts(rows, tables))


class _Part(NamedTuple):
    """A table as text: each column after those of `Table.rows` has a name, and a place, which is its group's."""

    title: str
    heads: list[str]
    places: list[str]
    names: list[str]
    body: list[list[str]]
    rows: list[Row]


def _parts(rows: Sequence[Row], tables: Sequence[Table]) -> Iterator[_Part]:
    for table in tables:
        records = [row for row in map(flat, rows) if table.having is None or row.get(table.having) is not None]
        for place in dict.fromkeys(_pick(record, table.each) for record in records):
            part = [record for record in records if _pick(record, table.each) == place]
            title = ": ".join(filter(None, [table.title, _place(table.each, place)]))
            yield _part(part, table._replace(title=title))


def _stale(part: _Part, is_current: Callable[[Row], bool]) -> str:
    count = sum(not is_current(row) for row in part.rows)
    return (
        f"\n{count} of {len(part.rows)} rows are of other code than today's; --fresh makes them anew.\n"
        if count
        else ""
    )


def _pick(row: Row, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in names)


def _place(names: tuple[str, ...], values: tuple[Any, ...]) -> str:
    """'sphere, 128 dim'."""
    pairs = zip(names, values, strict=True)
    return ", ".join(v if isinstance(v, str) else f"{_text(v)} {name}" for name, v in pairs)


def _part(rows: list[Row], table: Table) -> _Part:
    lines = list(dict.fromkeys(_pick(row, table.rows) for row in rows))
    groups = list(dict.fromkeys(_pick(row, table.columns) for row in rows))
    cells = {(_pick(row, table.rows), _pick(row, table.columns)): row for row in rows}

    def used(group, value):
        return any(row.get(value) is not None for row in rows if _pick(row, table.columns) == group)

    columns = [(group, value) for group in groups for value in table.values if used(group, value)]

    body = [[*map(_text, line), *(_cell(cells.get((line, g)), v) for g, v in columns)] for line in lines]
    for footer in table.footers:
        some = {
            g: next((r for r in rows if _pick(r, table.columns) == g and r.get(footer) is not None), None)
            for g in groups
        }
        shown = [_cell(some[g], footer) if v == table.values[0] else "" for g, v in columns]
        body.append([f"*{footer.replace('_', ' ')}*", *[""] * (len(table.rows) - 1), *shown])
    places = [_place(table.columns, group).replace("_", " ") for group, _ in columns]
    named = len(table.values) > 1 or not table.columns
    return _Part(
        table.title,
        [name.replace("_", " ") for name in table.rows],
        places,
        [value.replace("_", " ") if named else "" for _, value in columns],
        body,
        rows,
    )


def _markdown(part: _Part) -> str:
    titles = [", ".join(filter(None, pair)) for pair in zip(part.places, part.names, strict=True)]
    rule = [*["---"] * len(part.heads), *["---:"] * len(titles)]
    lines = [[*part.heads, *titles], rule, *part.body]
    return f"### {part.title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def width() -> int:
    """Columns of the terminal; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def _plain(part: _Part, limit: int) -> str:
    first = len(part.heads)
    texts = list(zip(*([*part.heads, *part.names], *part.body), strict=True))  # by column
    widths = [max(map(len, column)) for column in texts]
    blocks: list[list[int]] = [[]]  # of columns that stand beside each other
    for place, group in _groups(part, range(first, len(texts))):
        widths[group[-1]] += max(0, len(place) - _width(widths, group))
        whole = _width(widths, [*range(first), *group]) <= limit
        for columns in [group] if whole else [[i] for i in group]:
            if blocks[-1] and _width(widths, [*range(first), *blocks[-1], *columns]) > limit:
                blocks.append([])
            blocks[-1] += columns
    return f"{part.title}\n" + "".join("\n" + _block(part, texts, widths, block) for block in blocks)


def _groups(part: _Part, columns: Iterable[int]) -> list[tuple[str, list[int]]]:
    """Neighbors that have the same place."""
    grouped = itertools.groupby(columns, lambda i: part.places[i - len(part.heads)])
    return [(place, list(group)) for place, group in grouped]


def _width(widths: list[int], columns: Sequence[int]) -> int:
    """Returns the width of columns with two spaces between them."""
    return sum(widths[i] + 2 for i in columns) - 2


def _block(part: _Part, texts: list[tuple[str, ...]], widths: list[int], columns: list[int]) -> str:
    heads = range(len(part.heads))
    places = [f"{place:>{_width(widths, group)}}" for place, group in _groups(part, columns)]
    lines = ["  ".join([" " * _width(widths, heads), *places])]
    for row in range(len(texts[0])):
        left = [f"{texts[i][row]:<{widths[i]}}" for i in heads]
        lines.append("  ".join([*left, *(f"{texts[i][row]:>{widths[i]}}" for i in columns)]))
    lines.insert(2, "-" * len(lines[0]))
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


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
    """Writes all scalars of all rows."""
    records = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
