"""Experiments: a config is a grid, a point is a row, a table and plots are derived. `python -m experiments.run`."""

import logging
import runpy
import sys
from pathlib import Path
from types import TracebackType

from absl import flags

from rqjax.core import extras


def _in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints one line if a command lacks an extra, whichever of its imports fails, or is interrupted."""
    try:
        with extras.explained():
            raise error
    except extras.MissingExtra as missing:
        print(f"error: {missing}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    except BaseException:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _in_one_line
logging.getLogger("jax").setLevel(logging.WARNING)  # no line for each kind of device that is missing
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # no line about its cache, the first time

flags.DEFINE_string("recipes", None, "Python file that is run first, which enters recipes of its own in rqjax.METHODS.")


def flags_parser(argv: list[str]) -> list[str]:
    """Parses absl flags; a wrong flag, config key or value is one line instead of a traceback.

    The file of --recipes runs before other flags are read, since a config may list all methods.
    """
    for arg, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, path = arg.partition("=")
        if name in ("--recipes", "-recipes"):
            path = path if equals else following
            if not Path(path).is_file():
                sys.exit(f"error: there is no file {path} (--recipes)")
            runpy.run_path(path)
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError, TypeError, LookupError, AttributeError, OSError) as error:
        sys.exit(f"error: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, or its class; ml_collections quotes its messages twice."""
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error) or type(error).__name__
    text = text[1:-1] if text.startswith("'\\'") else text
    return " ".join(text.replace("\\n", " ").replace("\\'", "'").split())
