"""Names: of things in a registry, whose look-up error names the nearest ones, and of quantizers in one another."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable
from typing import Any


class UnknownName(KeyError):
    """A name that a registry does not hold."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UnknownName:
    """The error for a name that is not among `known`; it names the nearest ones."""
    near = difflib.get_close_matches(name, known, cutoff=0.5)
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
        """A line for each name: of a function the first one of its docstring."""
        docs = {name: inspect.getdoc(entry) if callable(entry) else None for name, entry in self.items()}
        return "\n".join(f"{name}: {doc.splitlines()[0]}" if doc else name for name, doc in docs.items())


def nest(tree: Any) -> str:
    """The names of quantizers and rotations in one another: "Normalized(Rotated(Rotor, Scalar))"."""
    values = [getattr(tree, field.name) for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []
    parts = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    inner = [nest(part) for part in parts if dataclasses.is_dataclass(part) and hasattr(part, "dim")]
    return type(tree).__name__ + (f"({', '.join(inner)})" if inner else "")
