"""Marks of the code that makes a row: rqjax's version, a hash of the experiment and of files it names in `MADE_BY`.

The hash alone says whether a row is current. Comments, docstrings, imports and code that only presents rows do not
count: neither prose nor a move nor a release ages a row.
"""

import ast
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import rqjax

ROOT = Path(__file__).parents[2]
RUNS = re.compile(r"^def run\(point", re.MULTILINE)
"""Pattern of a line that an experiment's module has and no other."""
PRESENTING = ("TABLES", "check", "plot")


@functools.cache
def experiments() -> dict[str, str]:
    """Returns the modules of experiments, those that run a point, by name, in whichever room they are."""
    paths = [path for path in sorted((ROOT / "experiments").rglob("*.py")) if RUNS.search(path.read_text())]
    return {path.stem: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}


@functools.cache
def code(experiment: str) -> str:
    """Returns the mark of the code that makes this experiment's rows today: "0.1.0+9f86d081884c"."""
    own = (ROOT / experiments()[experiment].replace(".", "/")).with_suffix(".py")
    hashed = hashlib.sha256()
    for path in [own, *files(own)]:
        content = path.read_bytes()
        hashed.update(_text(ast.parse(content)).encode() if path.suffix == ".py" else content)
    return f"{rqjax.__version__}+{hashed.hexdigest()[:12]}"


def files(own: Path) -> list[Path]:
    """Returns the files that an experiment's `MADE_BY` names: paths in the repository, or patterns of paths."""
    assigned = [node for node in ast.parse(own.read_bytes()).body if isinstance(node, ast.Assign)]
    named = [ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "MADE_BY"]
    return [path for patterns in named for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def is_current(row: dict[str, Any]) -> bool:
    """Returns whether today's code would make this flat row; False for a row that does not know its code."""
    name = row.get("experiment")
    return name in experiments() and _hash(row.get("made_by") or "") == _hash(code(name))


def _hash(mark: str) -> str:
    return mark.partition("+")[2]


def _counts(node: Any) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return False
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name not in PRESENTING
    return True


def _text(node: Any) -> str:
    """Writes a syntax tree without what does not count; unlike `ast.dump`, alike in every version of Python."""
    if isinstance(node, list):
        return f"[{','.join(_text(n) for n in node if _counts(n))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [f"{name}={_text(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(fields)})"
