"""Arrays that take long to make are made once."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np


def folder() -> Path:
    """Returns the folder of what is made once: $RQJAX_CACHE, or ~/.cache/rqjax."""
    return Path(os.environ.get("RQJAX_CACHE", Path.home() / ".cache" / "rqjax"))


def cached(name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns the array `name` of $RQJAX_CACHE (~/.cache/rqjax), made by `make` if it is missing or unreadable."""
    path = folder() / name
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        array = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.save(file, array)
    os.replace(file.name, path)  # a reader never sees half a file
    return array
