"""Makes tables one after the other, each with a sentence that says what to see: those of `TABLES`, or of the configs
that are named.

    python -m experiments.tables --into=runs parameters cache_size
"""

import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

import experiments
from experiments import run

INTO = flags.DEFINE_string("into", "runs", "Folder with a folder for each table.")
TABLES: dict[str, dict[str, tuple]] = {
    "parameters": {},
    "kv_memory": {},
    "cache_size": {},
    "distortion": {"bits": (3,), "data": ("sphere", "decaying_spectrum", "words")},
    "inner_product": {"bits": (3,), "data": ("sphere",)},
    "rotation_mixing": {"data": ("gaussian", "outlier_channels", "one_hot", "words")},
    "fractional": {},
}
"""Parts of each config's grid that are made: all of it, or as much as takes a minute."""
NEXT = """
To try next:
  make test     the test suite
  make models   tables on language models, an hour and a half
  {python} -m experiments.run distortion
                the whole grid of a config; it keeps the rows that are there
The tables of all configs are in results/; README.md says what they mean."""


def make(names: Sequence[str], into: Path) -> None:
    """Makes the tables of these configs, prints each as it is done, and at the end what was made."""
    made, paths = {}, {path.stem: path for path in map(Path, map(run.find, names))}
    for number, (name, path) in enumerate(paths.items(), 1):
        start = time.perf_counter()
        config = runpy.run_path(str(path))["get_config"]().to_dict()
        part = TABLES.get(name, {})
        config["grid"] |= part
        chosen = "".join(f", {key} {', '.join(map(str, values))}" for key, values in part.items())
        print(f"[{number} of {len(paths)}] {name}{chosen}\n", flush=True)
        made[name] = run.run(config, into / name)
        print(run.shown(made[name], run.to_see(path)))
        print(f"({time.perf_counter() - start:.0f} s)\n", flush=True)
    print("Made (each folder also keeps rows.jsonl, from which a run goes on):")
    for name, what in made.items():
        print(f"  {into / name}/: {', '.join(path.name for path in what.files)}")
    print(NEXT.format(python=os.path.relpath(sys.executable)))


def main(argv: list[str]) -> None:
    names = argv[1:] or list(TABLES)
    try:
        make(names, Path(INTO.value))
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
