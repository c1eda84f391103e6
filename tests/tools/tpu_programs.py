"""The process behind `tpu.compiled` for XLA programs.

Arguments are a folder that is not used and names of programs; JSON goes to the last line of standard output.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from tests.tools.apple import formulated
from tests.tools.programs import PROGRAMS
from tests.tools.tpu_compile import compile_for

CHIP = "v5e"
"""Chip to compile for: what XLA refuses of plain programs, it refuses on all chips."""


def main(names: list[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name in names or PROGRAMS:
        function, arguments = PROGRAMS[name]()
        found[name] = {CHIP: _compiled(CHIP, function, arguments)}
    return found


def _compiled(chip: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """Returns "compiles", or the reason why a program does not."""
    try:
        with formulated("tpu"):
            compile_for(chip, function, *arguments)
    except Exception as error:  # of many kinds
        return " ".join(str(error).split())[:300]
    return "compiles"


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[2:])))
