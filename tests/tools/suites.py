"""Parameters of a test, and which of them belong to the core."""

from collections.abc import Iterable
from typing import Any

import pytest

SEEN = {
    "rtn",  # affine
    "turboquant_prod_orthogonal",  # turboquant_prod
    "turboquant_mixed",  # rotorquant_paper splits
    "hadamard",  # rotorquant_trellis
    "rotor_chain",
    "rotorquant_prod",  # turboquant_prod and rotorquant
    "rotorquant_paper_prod",
    "affine_rotated",  # affine_rotated_sign
    "rotor_chain_learned",  # rotorquant_learned and rotorquant_trellis
    "opq",  # lopq
}
"""Recipes made of the parts of others, left out by tests of every part; a new recipe is not among them."""


def distinct(names: Iterable[str]) -> list[str]:
    """Recipes that name each part, as a part of a nest, at least once."""
    return [name for name in names if name not in SEEN]


def some(values: Iterable[Any], core: Iterable[Any]) -> list[Any]:
    """All values, or tuples of them, as parameters; those that are not in `core` are of the full suite only."""
    values, core = list(values), list(core)
    assert all(value in values for value in core), core
    parts = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[] if value in core else pytest.mark.full for value in values]
    return [pytest.param(*part, marks=mark) for part, mark in zip(parts, marks, strict=True)]
