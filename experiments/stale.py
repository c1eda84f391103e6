"""Lists the committed tables with rows that today's code did not make: `python -m experiments.stale`.

Rows know the code that made them (`experiments.harness.sources`).
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from experiments.harness import sources

RESULTS = sources.ROOT / "results"


def stale(results: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yields folders with such rows: name, counts of rows of other code and of rows that know none, and of all."""
    for path in sorted(results.glob("*/rows.csv")):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        unknown = sum(not row.get("made_by") for row in rows)
        other = sum(not sources.is_current(row) for row in rows) - unknown
        if other or unknown:
            yield path.parent.name, other, unknown, len(rows)


if __name__ == "__main__":
    found = list(stale(RESULTS))
    for name, other, unknown, count in found:
        print(f"{name:22} of {count:4} rows {other:4} are of other code than today's, {unknown:4} of unknown code")
    print(f"{len(found)} of {len(list(RESULTS.glob('*/rows.csv')))} tables hold rows that today's code did not make.")
    if found:
        print("Anew: python -m experiments.run <config> --workdir=results/<table> --fresh")
