"""Compiled programs: Linux has room for so many of them."""

import gc
import sys
from pathlib import Path

MOST_MAPPINGS = 30_000
"""Most memory mappings before programs are dropped. Those of the laws' tests alone leave 20,000; Linux grants a process
65,530 (`vm.max_map_count`). Beyond that LLVM dies of a segmentation fault while it compiles."""


def drop_if_many() -> None:
    """Drops all compiled programs if there are many."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()
