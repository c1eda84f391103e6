"""Experiments: a config is a grid, a point is a row, a table and plots are derived. `python -m experiments.run`."""

import sys

from absl import flags


def flags_parser(argv: list[str]) -> list[str]:
    """Parses absl flags; a wrong flag, config key or value is one line instead of a traceback."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error.args[0] if error.args else error).split())}")
