"""The environment that a row was measured in."""

import functools
import subprocess
from pathlib import Path

import jax

from experiments.harness import sources


def environment(experiment: str) -> dict[str, str]:
    """Git revision, the hash of the code that made the row, jax version and device kind."""
    device = jax.devices()[0].device_kind
    return {"revision": _revision(), "made_by": sources.code(experiment), "jax": jax.__version__, "device": device}


@functools.cache
def _revision() -> str:
    def git(*args: str) -> str:
        result = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return result.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
