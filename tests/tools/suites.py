"""Which parameters of a test belong to the core."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], core: Iterable[Any]) -> list[Any]:
    """All values, or tuples of them, as parameters; those that are not in `core` are of the full suite only."""
    values, core = list(values), list(core)
    assert all(value in values for value in core), core
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[] if value in core else pytest.mark.full for value in values]
    return [pytest.param(*part, marks=mark) for part, mark in zip(parts, marks, strict=True)]
