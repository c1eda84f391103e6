"""Layout of the rooms of rqjax and of the experiments: who imports whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = (
    ("core",),
    ("arrays",),
    ("codebooks", "rotations"),
    ("scoring",),
    ("quantizers",),
    ("learning",),
    ("cache", "search"),
    ("recipes", "paging"),
    ("backends", "nn"),
)
"""Rooms; each may import from its own and from those before it."""
AT_ROOT = {"metrics": 0, "theory": 3, "storage": 8}
"""Modules outside the rooms, and how many floors they may import from; `__init__` from all."""
EXPERIMENTS_FLOORS = (
    ("harness",),
    ("data", "models"),
    ("caches", "codes", "matrices", "search"),
    ("language",),
    ("devices",),
)
"""Rooms of experiments; each may import from its own floor and from those before it, none from a command."""


def modules(package: str) -> dict[str, Path]:
    """The files of the modules in a package, by name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / package).rglob("*.py"))
    }


PATHS = modules("rqjax")
EXPERIMENTS = modules("experiments")


def imports(module: str, paths: dict[str, Path] = PATHS) -> set[str]:
    """The modules of its package that a module imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(paths[module].read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == module.partition(".")[0]:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in paths else str(node.module) for name in names}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


INSIDE = [module for module in PATHS if module != "rqjax" and room(module) not in AT_ROOT]


def test_no_arrow_goes_up():
    wrong = []
    for module in PATHS:
        if module == "rqjax":
            continue
        here = room(module)
        for other in imports(module):
            there = room(other) if other != "rqjax" else "the whole"
            if here in AT_ROOT:
                fine = there in AT_ROOT or (there != "the whole" and floor(there) < AT_ROOT[here])
            else:
                fine = there not in ("the whole", *AT_ROOT) and (there == here or floor(there) < floor(here))
            if not fine:
                wrong.append(f"{module} -> {other}")
    assert wrong == []


def depths(paths: dict[str, Path] = PATHS) -> dict[str, int]:
    """Returns how many modules each needs beneath it; a circle raises RecursionError."""
    known: dict[str, int] = {}

    def depth(module: str) -> int:
        if module not in known:
            known[module] = 1 + max((depth(other) for other in imports(module, paths) - {module}), default=-1)
        return known[module]

    return {module: depth(module) for module in paths}


def test_no_arrow_between_rooms_of_experiments_goes_up():
    height = {name: i for i, rooms in enumerate(EXPERIMENTS_FLOORS) for name in rooms}
    inside = [module for module, path in EXPERIMENTS.items() if path.parent != ROOT / "experiments"]
    assert {room(module) for module in inside} == set(height)
    wrong = [
        f"{module} -> {other}"
        for module in inside
        for other in imports(module, EXPERIMENTS) - {"experiments"}
        if height.get(room(other), len(height)) > height[room(module)]
    ]
    assert wrong == []
    assert max(depths(EXPERIMENTS).values()) < 12  # no circle


def test_there_is_no_circle_and_no_tower():
    assert max(floor for module, floor in depths().items() if module != "rqjax") < 20


def test_only_the_package_itself_imports_backends():
    for module in PATHS:
        if module != "rqjax" and room(module) != "backends":
            assert not [other for other in imports(module) if room(other) == "backends"]


def test_the_root_and_the_files_are_small():
    assert len(list((ROOT / "rqjax").glob("*.py"))) <= 6
    folders = ("rqjax", "experiments", "configs", "pallas_kernels")
    lines = {path: len(path.read_text().splitlines()) for name in folders for path in (ROOT / name).rglob("*.py")}
    assert {str(path): count for path, count in lines.items() if count > 400} == {}


SCRIPT = """
import importlib, sys, types
import jax, optax, flax.nnx  # once for all
path = sys.argv[1]
for name in sys.argv[2:]:
    for old in [m for m in sys.modules if m.split(".")[0] == "rqjax"]:
        del sys.modules[old]
    sys.modules["rqjax"] = package = types.ModuleType("rqjax")
    package.__path__ = [path]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""


@pytest.mark.full
def test_each_module_can_be_imported_first():
    names = [module for module in PATHS if module != "rqjax"]
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "rqjax"), *names]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
