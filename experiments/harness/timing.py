"""Functions that are compared take turns in one process, so that whatever slows the machine down slows all of them."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


def turns(functions: Mapping[str, Callable[[], Any]], rounds: int, calls: int = 1) -> dict[str, np.ndarray]:
    """Measures seconds of each function's calls (rounds, calls), one behind the other in its turn. The first call finds
    the caches as the others left them, the second as it left them itself."""
    times = {name: np.zeros((rounds, calls)) for name in functions}
    for turn in range(rounds):
        for name, function in functions.items():
            for call in range(calls):
                start = time.perf_counter()
                jax.block_until_ready(function())
                times[name][turn, call] = time.perf_counter() - start
    return times


def medians(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Measures median seconds of each function's calls in so many rounds, after one in which it may be compiled."""
    return {name: float(np.median(times[1:])) for name, times in turns(functions, rounds + 1).items()}
