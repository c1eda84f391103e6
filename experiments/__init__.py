"""Experiments: a config is a grid, a point is a row, a table and plots are derived. `python -m experiments.run`."""

import sys

from absl import flags


def flags_parser(argv: list[str]) -> list[str]:
    """Parses absl flags; a wrong flag, config key or value is one line instead of a traceback."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        sys.exit(f"error: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; ml_collections quotes its messages twice."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    text = text[1:-1] if text.startswith("'\\'") else text
    return " ".join(text.replace("\\n", " ").replace("\\'", "'").split())
