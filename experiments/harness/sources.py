"""Which code makes a row: a hash of the source of an experiment and of what it imports of this repository.

Comments, docstrings and what only presents rows do not count. What a package exports counts where it is defined, and
only if it is used; an import within a function counts in the rows that were made after it was taken.
"""

import ast
import functools
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("experiments", "rqjax", "pallas_kernels")
REGISTERING = {"rqjax.core.dispatch": "rqjax.backends"}
"""Packages whose modules take part wherever a module does, though it does not import them."""
PRESENTING = ("experiments.harness.plot", "experiments.harness.table")
"""Modules that show rows and make none."""
RUNS = re.compile(r"^def run\(point", re.MULTILINE)
"""What an experiment's module has and no other."""
NOT_FOR_ROWS = ("TABLES", "check", "plot")
"""Of an experiment's module: what is read before or after `run`."""


def code(experiment: str) -> str:
    """The hash of what makes this experiment's rows, and the modules that functions have imported: hash+module+..."""
    return _code(ROOT, experiments(ROOT)[experiment], frozenset(sys.modules))


@functools.cache
def experiments(root: Path) -> dict[str, str]:
    """The modules of experiments by name, in whichever room they are: those that run a point."""
    paths = [path for path in sorted((root / "experiments").rglob("*.py")) if RUNS.search(path.read_text())]
    return {path.stem: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}


def is_current(row: dict[str, Any]) -> bool:
    """Whether today's code would make this flat row; False for one that does not know its code."""
    made_by = row.get("made_by") or ""
    try:
        start = experiments(ROOT)[str(row.get("experiment"))]
        return _code(ROOT, start, frozenset(made_by.split("+")[1:])) == made_by
    except (KeyError, FileNotFoundError):  # there is no such experiment, or no such module, any more
        return False


@functools.cache
def _code(root: Path, start: str, loaded: frozenset[str]) -> str:
    modules, taken, todo = set(), set(), [start]
    while todo:
        module = todo.pop()
        if module not in modules and module not in PRESENTING:
            modules.add(module)
            _, now, later = _source(root, module)
            # `import rqjax` takes all of it but rqjax.nn.
            always = {name for name in later if name.startswith("rqjax.") and not name.startswith("rqjax.nn.")}
            taken |= (later - always) & loaded
            todo += now | always | taken
            if module in REGISTERING:
                todo += _modules(root, REGISTERING[module])
    lines = [f"{module} {_source(root, module)[0]}" for module in sorted(modules)]
    return "+".join([hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12], *sorted(taken)])


@functools.cache
def _source(root: Path, module: str) -> tuple[str, frozenset[str], frozenset[str]]:
    """A module's hash, and what it imports: when it is imported itself, and when its functions are called."""
    path = _path(root, module)
    if path is None:
        raise FileNotFoundError(f"there is no module {module} in {root}")
    tree = ast.parse(path.read_bytes())
    if module.startswith("experiments."):
        tree.body = [node for node in tree.body if _name(node) not in NOT_FOR_ROWS]
    data = [path.with_name(name) for name in _strings(tree) if name.endswith(".npz")]
    hashed = hashlib.sha256(_text(tree).encode())
    for file in sorted(set(data)):
        if file.exists():
            hashed.update(file.read_bytes())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    now, later = set(), set()
    for node in ast.walk(tree):
        (later if id(node) in inner else now).update(_imports(root, tree, node))
    return hashed.hexdigest(), frozenset(now), frozenset(later)


def _imports(root: Path, tree: ast.Module, node: ast.AST) -> Iterator[str]:
    """The modules of this repository that a node imports."""
    match node:
        case ast.ImportFrom(module=str(package)) if _ours(package):
            yield from (_defining(root, package, alias.name) for alias in node.names)
        case ast.Import():
            for alias in filter(lambda alias: _ours(alias.name), node.names):
                yield from _used(root, tree, alias.name, alias.asname or alias.name)
        case ast.Call(args=[ast.JoinedStr(values=[ast.Constant(value=str(prefix)), *_]), *_]) if _ours(prefix):
            # importlib.import_module(f"pallas_kernels.{module}"): any module of the package
            yield from _modules(root, prefix.strip("."))


def _modules(root: Path, package: str) -> Iterator[str]:
    """The modules in the folder of a package."""
    folder = root.joinpath(*package.split("."))
    yield from (f"{package}.{path.stem}" for path in sorted(folder.glob("[!_]*.py")))


def _used(root: Path, tree: ast.Module, package: str, name: str) -> Iterator[str]:
    """Where the attributes of an imported package are defined; the package, if it is used otherwise."""
    attributes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == name]
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == name]
    yield from (_defining(root, package, attribute.attr) for attribute in attributes)
    if len(names) != len(attributes):
        yield package


def _defining(root: Path, package: str, name: str) -> str:
    """The module in which a name of a package or module is defined."""
    if _path(root, f"{package}.{name}"):
        return f"{package}.{name}"
    path = _path(root, package)
    for node in ast.parse(path.read_bytes()).body if path and path.stem == "__init__" else []:
        if isinstance(node, ast.ImportFrom) and node.module and _ours(node.module):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _defining(root, node.module, alias.name)
    return package


def _ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _path(root: Path, module: str) -> Path | None:
    folder = root.joinpath(*module.split("."))
    return next((path for path in (folder.with_suffix(".py"), folder / "__init__.py") if path.exists()), None)


def _name(node: ast.stmt) -> str | None:
    """What a statement defines or assigns."""
    match node:
        case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def _strings(tree: ast.AST) -> Iterable[str]:
    return (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def _text(node: Any) -> str:
    """A tree without docstrings and positions; the same in every version of Python, as `ast.dump` is not."""
    if isinstance(node, list):
        kept = [n for n in node if not (isinstance(n, ast.Expr) and _is_text(n.value))]
        return f"[{','.join(map(_text, kept))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [f"{name}={_text(value)}" for name, value in ast.iter_fields(node) if value is not None and value != []]
    return f"{type(node).__name__}({','.join(fields)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
