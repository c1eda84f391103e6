"""Runs an experiment: every point of the config's grid is one row; table, CSV and plots are derived from the rows.

    python -m experiments.run --config=configs/codes/distortion.py --config.grid.bits='(2,3)'
    python -m experiments.run distortion              # the whole grid of the same config, by its name
    python -m experiments.run distortion --help       # what it is about, its grid and other values
    python -m experiments.run distortion --shard=0/4  # a fourth of its rows; other machines make the others
    python -m experiments.run distortion --recipes=mine.py  # with the methods that this file enters in rqjax.METHODS

Rows are appended to `rows.jsonl` as they finish. A run that was stopped, however rudely, goes on where it was. A row
knows the code that made it; --fresh repeats the rows that today's code did not make.
"""

import ast
import importlib
import itertools
import runpy
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import app, flags
from ml_collections import config_flags

import experiments
from experiments.harness import programs, sources, table
from experiments.harness.environment import environment
from experiments.harness.rows import Rows
from experiments.harness.texts import numbers
from rqjax.core import check_int, extras, platforms, unknown_name

CONFIG = config_flags.DEFINE_config_file("config", None, "File with the config; see configs/.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Folder for rows, table and plots; runs/<config name>, or the config's.")
EXPERIMENTS = sources.experiments()
SHARD = flags.DEFINE_string("shard", "0/1", "i/n: only the i-th of n parts of the rows, from 0.")
FRESH = flags.DEFINE_bool("fresh", False, "Repeat the rows that were made by other code than today's.")
TRACEBACK = flags.DEFINE_bool("traceback", False, "Show where an error comes from.")
TO_SEE = "To see: "
"""Beginning of the paragraph of a config's docstring that says what its table shows."""


class Made(NamedTuple):
    """Tables and files that a run has made."""

    markdown: str
    shown: str
    """The table for a terminal."""
    files: list[Path]


def points(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the product of the grid's tuples, each point with the config's other values."""
    grid = {name: values if isinstance(values, tuple | list) else (values,) for name, values in config["grid"].items()}
    fixed = {name: value for name, value in config.items() if name not in ("grid", "workdir")}
    for values in itertools.product(*grid.values()):
        yield {**fixed, **dict(zip(grid, values, strict=True))}


def load(name: str) -> Any:
    """The module of an experiment."""
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, EXPERIMENTS)
    with extras.explained():
        return importlib.import_module(EXPERIMENTS[name])


def run(config: Mapping[str, Any], workdir: Path, fresh: bool = False, shard: tuple[int, int] = (0, 1)) -> Made:
    """Runs what is missing of the grid, and if `fresh` what other code made; writes table.md, rows.csv and plots.

    A shard (i, n) is every n-th row from the i-th on, in a file of its own; the table is of all rows that are there.
    """
    if platforms.platform() == "METAL":
        jax.random.key = jax.random.PRNGKey  # typed ones are lowered with a custom call (jax issue 16287)
    experiment, todo = load(config["experiment"]), list(points(config))
    for point in todo if hasattr(experiment, "check") else []:
        try:
            experiment.check(point)
        except ValueError as error:
            row = ", ".join(f"{name}={point[name]!r}" for name in config["grid"])
            raise ValueError(f"{experiments.one_line(error)} (in the row {row})") from error
    part, parts = shard
    rows = Rows(workdir / ("rows.jsonl" if parts == 1 else f"rows-{part}-of-{parts}.jsonl"))
    sources.code(config["experiment"])  # reads what has been imported, whatever is edited from here on
    for point in _with_bar(todo[part::parts], config["experiment"]):
        row = rows.find(point)
        if row is None or (fresh and not sources.is_current(table.flat(row))):
            programs.drop_if_many()
            start = time.perf_counter()
            metrics = experiment.run(point)
            seconds = round(time.perf_counter() - start, 3)
            rows.append(point, metrics, {**environment(config["experiment"]), "seconds": seconds})
    done = [row for point in todo if (row := rows.find(point))]
    markdown, shown = (make(done, experiment.TABLES, sources.is_current) for make in (table.render, table.show))
    files = [workdir / "table.md", workdir / "rows.csv"]
    files[0].write_text(markdown)
    table.write_csv(done, files[1])
    return Made(markdown, shown, files + (experiment.plot(done, workdir) if hasattr(experiment, "plot") else []))


def to_see(path: Path) -> str:
    """The sentence in a config's docstring that says what its table shows; "" if there is none."""
    paragraphs = (ast.get_docstring(ast.parse(path.read_bytes())) or "").split("\n\n")
    return next((" ".join(part.split()) for part in paragraphs if part.startswith(TO_SEE)), "")


def shown(made: Made, sentence: str) -> str:
    """The table for a terminal, and below it what to see."""
    return "\n".join(filter(None, [made.shown, textwrap.fill(sentence, table.width())]))


def _with_bar(todo: list[dict[str, Any]], name: str) -> Iterable[dict[str, Any]]:
    """Adds a progress bar if there is a terminal and tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return todo
    return tqdm(todo, desc=name, unit="row", disable=None, dynamic_ncols=True)


def _default_workdir(config: Mapping[str, Any], name: str) -> str:
    """Returns the config's folder, unless it is only rehearsed; runs/<config name> if it names none."""
    return f"runs/{name}" if config.get("rehearse") else config.get("workdir") or f"runs/{name}"


def configs() -> dict[str, Path]:
    """Finds the files of all configs by name, in whichever room they are."""
    return {path.stem: path for path in sorted(sources.ROOT.glob("configs/*/*.py"), key=lambda path: path.stem)}


def find(name: str) -> str:
    """Finds the path of a config, given by its name or path.

    Raises:
        LookupError: If there is none; the message names the nearest one.
    """
    known, stem = configs(), Path(name).stem
    if name in known:
        return str(known[name])
    if Path(name.partition(":")[0]).is_file():
        return name
    if stem in known:
        raise LookupError(f"there is no config {name}; did you mean {known[stem].relative_to(sources.ROOT)}?")
    raise unknown_name("config", stem, known)


def with_config(argv: list[str]) -> list[str]:
    """Puts the path of a config in the place of its name; prints help for --help, and exits.

    The name is the first argument, or the value of --config.
    """
    args = argv[1:]
    if args and not args[0].startswith("-"):
        args[0] = f"--config={args[0]}"
    try:
        files = {i: find(arg.removeprefix("--config=")) for i, arg in enumerate(args) if arg.startswith("--config=")}
    except LookupError as error:
        sys.exit(f"error: {experiments.one_line(error)}")
    if any(arg in ("--help", "-h", "--helpshort") for arg in args):
        print(about(Path(*list(files.values())[-1:])) if files else _help(configs().values()))
        sys.exit()
    if not any(arg.partition("=")[0] == "--config" for arg in args):
        sys.exit("error: expected the name of a config, as in `experiments.run fractional`; --help lists them")
    for file in files.values():
        _check_keys(file, args)
    return [argv[0], *(f"--config={files[i]}" if i in files else arg for i, arg in enumerate(args))]


def _check_keys(file: str, args: list[str]) -> None:
    """Ends with one line if a flag names no key of the grid, or a key without `--config.grid.` before it."""
    names = [arg.partition("=")[0] for arg in args]
    wrong = [name for name in names if name.startswith("--config.grid.") or name.removeprefix("--") not in flags.FLAGS]
    if not wrong or not Path(file).is_file():
        return
    config = runpy.run_path(file)["get_config"]()
    for name in wrong:
        key = name.removeprefix("--config.grid.")
        if key != name and key not in config.grid:
            sys.exit(f"error: {experiments.one_line(unknown_name('key of the grid', key, config.grid))}")
        key = name.rpartition(".")[2].removeprefix("--")
        place = "config.grid" if key in config.grid else "config"
        if (key in config.grid or key in config) and name != f"--{place}.{key}":
            sys.exit(f"error: unknown flag {name}; did you mean --{place}.{key}?")


def about(path: Path) -> str:
    """Returns the docstring of a config, and its values."""
    config = runpy.run_path(str(path))["get_config"]()
    values = [f"  --config.{name}={value!r}" for name, value in config.items() if name not in ("grid", "experiment")]
    grid = [f"  --config.grid.{name}={value!r}" for name, value in config.grid.items()]
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    return "\n".join([text, "", "Its grid, every combination of which is a row:", *grid, "Other values:", *values])


def _help(paths: Iterable[Path]) -> str:
    first = {path.stem: (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0] for path in paths}
    own = [flags.FLAGS[name] for name in ("workdir", "shard", "fresh", "recipes", "traceback")]
    lines = [f"  --{flag.name}: {flag.help}" for flag in own]
    return "\n".join([__doc__ or "", *lines, "", "Configs:", *(f"  {name}: {line}" for name, line in first.items())])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    path = Path(config_flags.get_config_filename(flags.FLAGS["config"]))
    try:
        config = CONFIG.value.to_dict()
        workdir = Path(WORKDIR.value or _default_workdir(config, path.stem))
        part, parts = numbers(SHARD.value, "0/4", "a shard, the first of four")
        made = run(config, workdir, FRESH.value, (check_int("the part of --shard", part, 0, parts - 1), parts))
    except (ValueError, TypeError, LookupError, OSError) as error:
        if TRACEBACK.value:
            raise
        sys.exit(f"error: {experiments.one_line(error)}")
    # What a config says of its table need not be true of another grid.
    sentence = "" if config_flags.get_override_values(flags.FLAGS["config"]) else to_see(path)
    print(shown(made, sentence))
    files = ", ".join(path.name for path in made.files)
    print(f"\nMade in {workdir}: {files}. A run goes on from the rows in rows.jsonl.")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=lambda argv: experiments.flags_parser(with_config(argv)))
