"""A JSON-lines file of finished rows that survives being killed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Rows:
    """Rows on disk, found by their point. What was written is on the disk before `append` returns.

    Rows of other runs into the same folder (`rows*.jsonl`: shards) are found, too. Of a point the file that was written
    to last counts.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._rows: dict[str, dict[str, Any]] = {}
        for one in sorted(path.parent.glob("rows*.jsonl"), key=lambda one: (one.stat().st_mtime_ns, one == path, one)):
            self._read(one)

    def _read(self, path: Path) -> None:
        text = path.read_bytes() if path.exists() else b""
        whole = text.rfind(b"\n") + 1
        if whole < len(text) and path == self.path:  # a write was cut short: its row is lost, the file is mended
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                self._rows[_key(row["point"])] = row
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path}, line {number}, is not a row of an experiment: {line[:60]!r}") from None

    def find(self, point: dict[str, Any]) -> dict[str, Any] | None:
        """The row of a point: {"point": ..., "metrics": ..., "environment": ...}."""
        return self._rows.get(_key(point))

    def append(self, point: dict[str, Any], metrics: dict[str, Any], environment: dict[str, Any]) -> None:
        row = {"point": point, "metrics": metrics, "environment": environment}
        with self.path.open("ab") as file:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows[_key(point)] = json.loads(json.dumps(row))


def mean_and_deviation(columns: Mapping[str, Any]) -> dict[str, float]:
    """Returns <name> and <name>_sd of each column, an array over the seeds, as `table.Table` shows them."""
    means = {name: float(values.mean()) for name, values in columns.items()}
    return means | {f"{name}_sd": float(values.std(ddof=1)) for name, values in columns.items() if len(values) > 1}


def _key(point: dict[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)
