"""Names of things in registries, whose look-up error gives the nearest ones, and names of nests of quantizers."""

import dataclasses
import difflib
import heapq
import inspect
import re
from collections.abc import Collection
from typing import Any


class UnknownName(KeyError):
    """Error for a name that a registry does not hold."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


ELSEWHERE: dict[str, Collection[str]] = {}
"""Names of other kinds, by the hint for one of them that is used in the wrong place."""


def unknown_name(kind: str, name: str, known: Collection[str]) -> UnknownName:
    """Makes the error for a name that is not among `known`, with the nearest names, or what it is elsewhere."""
    base = re.sub(r"_\d+(\.\d+)?$", "", re.split(r"[+/]", str(name))[0])  # without the bits and options of a strategy
    places = {other: said for said, names in reversed(ELSEWHERE.items()) for other in names} | dict.fromkeys(known, "")

    def likeness(other: str) -> float:
        return max(difflib.SequenceMatcher(None, other, text).ratio() for text in (str(name), base))

    near = heapq.nlargest(3, places, key=likeness)
    near = [other for other in near if likeness(other) >= (0.5 if other in known else 0.75)]
    if near and near[0] not in known:
        hint = f"{near[0]!r} {places[near[0]]}; "
    elif near and near[0] == base != name:
        hint = f"did you mean {base!r}, with its bits apart? "
    else:
        near = [other for other in near if other in known]
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return UnknownName(f"unknown {kind} {name!r}; {hint}known: {', '.join(sorted(known))}")


class Registry(dict[str, Any]):
    """A dictionary of named things whose look-up error names the nearest valid name."""

    def __init__(self, kind: str, entries: dict[str, Any]):
        self.kind = kind
        dict.__init__(self, entries)

    def __missing__(self, name: str) -> Any:
        raise unknown_name(self.kind, name, self)

    def __repr__(self) -> str:
        """Lists the names, each with the first line of its docstring if it is a function."""
        docs = {name: inspect.getdoc(entry) if callable(entry) else None for name, entry in self.items()}
        return "\n".join(f"{name}: {doc.splitlines()[0]}" if doc else name for name, doc in docs.items())


def nest(tree: Any) -> str:
    """The names of quantizers and rotations in one another: "Normalized(Rotated(Rotor, Scalar))"."""
    values = [getattr(tree, field.name) for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    inner = [nest(part) for part in parts if dataclasses.is_dataclass(part) and hasattr(part, "dim")]
    return type(tree).__name__ + (f"({', '.join(inner)})" if inner else "")
