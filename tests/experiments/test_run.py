"""Runs survive kills and resume, rows know their code, tables fit a terminal; what is wrong or missing is one line."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from absl.testing import flagsaver

import experiments
import rqjax
from experiments import run, stale, tables
from experiments.data import samples
from experiments.harness import sources, table
from experiments.harness.rows import Rows
from experiments.matrices import exchange_theory
from experiments.search import peers, search
from rqjax.core import extras
from rqjax.nn import load_decoder

ROOT = Path(__file__).parents[2]
CONFIG = {
    "experiment": "distortion",
    "n": 32,
    "seeds": 2,
    "grid": {"dim": (16,), "bits": (1, 2), "method": ("identity",), "data": ("sphere", "one_hot")},
}


@pytest.fixture
def command(monkeypatch):
    """`python -m experiments.run` in this process."""

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["run", *flags])
        with flagsaver.flagsaver():
            run.main(experiments.flags_parser(run.with_config(sys.argv)))

    monkeypatch.chdir(ROOT)
    return call


@pytest.fixture
def counted(monkeypatch):
    """An experiment that takes no time, and the points that have run."""
    ran = []
    experiment = SimpleNamespace(
        TABLES=(table.Table("T", ("bits",), ("data",), ("m",)),), run=lambda point: ran.append(point) or {"m": 1.5}
    )
    monkeypatch.setattr(run, "load", lambda name: experiment)
    return ran


@pytest.mark.full
def test_smoke_by_flags(tmp_path, command, capsys):
    flags = ["--config=configs/codes/smoke.py", "--config.grid.bits=(1, 3)", f"--workdir={tmp_path}"]
    command(*flags)
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["point"]["bits"] for row in rows] == [1, 1, 1, 1, 3, 3, 3, 3]
    assert set(rows[0]["environment"]) == {"revision", "made_by", "jax", "device", "seconds"}
    heads = "### Relative mean squared error: one_hot, 32 dim\n\n| method | 1 bits, mse | 1 bits, stored"
    assert heads in (tmp_path / "table.md").read_text()
    assert "Relative mean squared error: one_hot, 32 dim\n\n" in out
    assert "other code" not in out
    assert max(map(len, out.splitlines()[:-1])) <= 120
    assert out.splitlines()[-1].startswith(f"Made in {tmp_path}: table.md, rows.csv, mse.png.")
    assert (tmp_path / "mse.png").stat().st_size > 5000
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert {"mse", "mse_sd", "lower_bound", "revision", "made_by"} <= set(header.split(","))
    assert len(lines) == 8
    command(*flags)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 8  # nothing ran twice


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--config.grid.bitz=(2,)",
            "unknown key of the grid 'bitz'; did you mean 'bits'? known: bits, data, dim, method",
        ),
        ("--config.grid.split=1", "unknown key of the grid 'split'; known: bits, data, dim, method"),
        ("--dim=3", "unknown flag --dim; did you mean --config.grid.dim?"),
        ("--config.dim=3", "unknown flag --config.dim; did you mean --config.grid.dim?"),
        ("--grid.dim=3", "unknown flag --grid.dim; did you mean --config.grid.dim?"),
        ("--seeds=3", "unknown flag --seeds; did you mean --config.seeds?"),
        ("--recipes=nope.py", "there is no file nope.py (--recipes)"),
        ("--config.sedes=3", 'Did you mean "seeds" instead of "sedes"?'),
        ("--wrkdir=x", "Unknown command line flag 'wrkdir'. Did you mean: workdir ?"),
        ("--config.seeds=two", "invalid literal for int() with base 10: 'two'"),
        ("--config=configs/distorton.py", "unknown config 'distorton'; did you mean 'distortion'"),
        (
            "--config=configs/distortion.py",
            "there is no config configs/distortion.py; did you mean configs/codes/distortion.py?",
        ),
        ("--config.grid.method=('rotorqant',)", "unknown method 'rotorqant'; did you mean 'rotorquant'"),
        ("--config.grid.data=('spher',)", "unknown data set 'spher'; did you mean 'sphere'"),
        ("--config.grid.bits=(9,)", "expected bits to be a whole number from 1 to 8, got 9 (in the row bits=9, "),
        ("--config.grid.data=('file:/nope.npy',)", "there is no file /nope.npy"),
        ("--config.experiment=distorton", "unknown experiment 'distorton'; did you mean 'distortion'"),
    ],
)
def test_wrong_flags_are_one_line(flag, message, tmp_path, command):
    with pytest.raises(SystemExit) as stopped:
        command("--config=configs/codes/smoke.py", flag, f"--workdir={tmp_path}")
    assert stopped.value.code.startswith("error: ")
    assert message in stopped.value.code
    assert "\n" not in stopped.value.code


def test_a_run_needs_a_config(command):
    with pytest.raises(SystemExit, match="expected the name of a config, as in"):
        command("--fresh")


def test_recipes_of_a_file_are_methods_of_the_grid(tmp_path, monkeypatch, command, counted):
    monkeypatch.setitem(rqjax.METHODS, "mine", None)
    (tmp_path / "mine.py").write_text("import rqjax\nrqjax.METHODS['mine'] = rqjax.rtn\n")
    grid = ("--config.grid.dim=(16,)", "--config.grid.bits=(2,)", "--config.grid.data=('sphere',)")
    for flags in ((f"--recipes={tmp_path}/mine.py",), ("--recipes", f"{tmp_path}/mine.py")):
        counted.clear()
        command("distortion", *grid, f"--workdir={tmp_path / str(len(flags))}", *flags)
        assert [point["method"] for point in counted] == list(rqjax.METHODS)
        assert rqjax.METHODS["mine"] is rqjax.rtn


@pytest.mark.full
def test_kill_loses_at_most_the_row_in_flight(tmp_path):
    """SIGKILL in the middle of a run; the next run repeats no row and finishes the grid."""
    flags = ["--config=configs/codes/smoke.py", "--config.grid.bits=(1, 2, 3)", f"--workdir={tmp_path}"]
    line = [sys.executable, "-m", "experiments.run", *flags]
    process = subprocess.Popen(line, cwd=ROOT, stderr=subprocess.DEVNULL)
    rows, deadline = tmp_path / "rows.jsonl", time.monotonic() + 120
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        with pytest.raises(subprocess.TimeoutExpired):  # it runs on
            process.wait(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows.read_bytes()
    assert before.count(b"\n") >= 3
    new_home = os.environ | {"MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, env=new_home)
    assert (done.returncode, done.stderr) == (0, "")  # no line about devices that are not there, or caches made
    after = rows.read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    points = [json.dumps(json.loads(line)["point"]) for line in after.splitlines()]
    assert len(points) == len(set(points)) == 12


def test_torn_last_line_is_repaired(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = Rows(path)
    rows.append({"a": 1}, {"m": 2.0}, {})
    rows.append({"a": 2}, {"m": 3.0}, {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    mended = Rows(path)
    assert mended.find({"a": 1})["metrics"] == {"m": 2.0}
    assert mended.find({"a": 2}) is None
    mended.append({"a": 2}, {"m": 3.0}, {})
    assert path.read_bytes() == whole


def test_foreign_rows_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"point": {"a": 1}, "metrics": {}}\n[1, 2]\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2, is not a row of an experiment: b'\[1, 2\]'"):
        Rows(path)


def test_a_config_by_its_name_and_what_help_says(command, capsys, tmp_path):
    smoke = f"--config={ROOT / 'configs/codes/smoke.py'}"
    assert run.with_config(["run", "smoke", "--fresh"])[1:] == [smoke, "--fresh"]
    assert run.with_config(["run", "--config=smoke"])[1:] == [smoke]
    with pytest.raises(SystemExit, match="error: unknown config 'smok'; did you mean 'smoke'"):
        run.with_config(["run", "smok"])
    with pytest.raises(SystemExit):
        run.with_config(["run", "--help"])
    out = capsys.readouterr().out
    assert "  distortion: RotorQuant's Table 4 and TurboQuant's Figure 3" in out
    assert "--shard: i/n" in out
    with pytest.raises(SystemExit):
        run.with_config(["run", "smoke", "--help"])
    out = capsys.readouterr().out
    assert out.startswith("Seconds: the machinery of a run")
    assert "  --config.grid.method=('identity', 'rotorquant')" in out


def test_configs_lie_in_the_room_of_their_experiment():
    found = list((ROOT / "configs").rglob("*.py"))
    assert sorted(run.configs().values()) == sorted(found)
    for path in found:
        name = run.runpy.run_path(str(path))["get_config"]()["experiment"]
        assert run.EXPERIMENTS[name].split(".")[1] == path.parent.name, path


def test_shards_make_one_table(tmp_path, counted):
    for part in (1, 0):
        made = run.run(CONFIG, tmp_path, shard=(part, 2))
        assert (tmp_path / f"rows-{part}-of-2.jsonl").exists()
    assert len(counted) == len(list(run.points(CONFIG))) == 4
    assert made.markdown.count("1.5") == 4
    run.run(CONFIG, tmp_path)
    assert len(counted) == 4


def test_another_config_makes_new_rows(tmp_path, counted):
    run.run(CONFIG, tmp_path)
    run.run({**CONFIG, "n": 33}, tmp_path)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == len(counted) == 8
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5  # the table is of the last config


def test_fresh_repeats_the_rows_of_other_code_only(tmp_path, counted):
    """One of four rows was made by other code, and one does not know by which code."""
    assert "other code" not in run.run(CONFIG, tmp_path).markdown
    first, second, *others = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    first["environment"]["made_by"] = "0" * 12
    del second["environment"]["made_by"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (first, second, *others)))
    made = run.run(CONFIG, tmp_path)
    assert len(counted) == 4
    for text in (made.markdown, made.shown, (tmp_path / "table.md").read_text()):
        assert text.endswith("\n2 of 4 rows are of other code than today's; --fresh makes them anew.\n")
    assert "other code" not in run.run(CONFIG, tmp_path, fresh=True).markdown
    assert counted[4:] == [first["point"], second["point"]]
    run.run(CONFIG, tmp_path, fresh=True)
    assert len(counted) == 6


TREE = {
    "experiments/toy.py": '"""Doc."""\n'
    "from rqjax.a import used\n\n"
    "MADE_BY = ('rqjax/a.py', 'rqjax/rooms/*')\n"
    "TABLES = (Table('Title'),)\n\n\n"
    'def run(point):\n    """Doc."""\n    from rqjax.a import used\n    return used(1)\n',
    "rqjax/a.py": "from rqjax.b import STEP\n\n\ndef used(x):\n    return x + STEP  # why\n",
    "rqjax/b.py": "STEP = 2\n",
    "rqjax/rooms/c.py": 'SIZE = 2\n"""Doc."""\n',
    "rqjax/rooms/levels.npz": "1",
}


@pytest.mark.parametrize(
    ("path", "old", "new", "changed"),
    [
        ("experiments/toy.py", "used(1)", "used(2)", True),
        ("experiments/toy.py", '"""Doc."""', '"""Another."""', False),
        ("experiments/toy.py", "'Title'", "'Another'", False),
        ("experiments/toy.py", "from rqjax.a", "from rqjax.elsewhere.a", False),
        ("rqjax/a.py", "x + STEP", "x - STEP", True),
        ("rqjax/a.py", "# why", "# or why\n    # not", False),
        ("rqjax/b.py", "2", "3", False),  # it is not named
        ("rqjax/rooms/c.py", "2", "3", True),
        ("rqjax/rooms/c.py", "Doc", "Another", False),
        ("rqjax/rooms/levels.npz", "1", "2", True),
    ],
)
def test_a_row_is_stale_when_what_it_was_made_with_has_changed(path, old, new, changed, tmp_path, monkeypatch):
    for folder in ("then", "now"):
        for name, text in TREE.items():
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(text)
    assert old in TREE[path]
    (tmp_path / "now" / path).write_text(TREE[path].replace(old, new))

    def code_in(folder):
        with monkeypatch.context() as patch:
            patch.setattr(sources, "ROOT", tmp_path / folder)
            patch.setattr(sources, "experiments", lambda: {"toy": "experiments.toy"})
            return sources.code.__wrapped__("toy")

    assert (code_in("then") != code_in("now")) == changed


def test_a_release_does_not_age_a_row(monkeypatch):
    row = {"experiment": "needle", "made_by": sources.code("needle")}
    assert sources.is_current(row)
    assert not sources.is_current({"experiment": "needle"})
    assert not sources.is_current({"experiment": "nothere", "made_by": row["made_by"]})
    assert not sources.is_current({"experiment": "needle", "made_by": row["made_by"][:-1]})
    monkeypatch.setattr(sources.rqjax, "__version__", "0.0.1")
    monkeypatch.setattr(sources, "code", sources.code.__wrapped__)
    assert sources.code("needle").startswith("0.0.1+")
    assert sources.is_current(row)


@pytest.mark.parametrize("name", sources.experiments())
def test_experiments_name_what_makes_their_rows(name):
    """All that they name exists, rqjax or its kernels among it."""
    own = (ROOT / sources.experiments()[name].replace(".", "/")).with_suffix(".py")
    patterns = ast.literal_eval(re.search(r"^MADE_BY = (\(.*?\))$", own.read_text(), re.MULTILINE | re.DOTALL)[1])
    assert [pattern for pattern in patterns if not list(ROOT.glob(pattern))] == []
    assert {"rqjax", "pallas_kernels"} & {path.relative_to(ROOT).parts[0] for path in sources.files(own)}


def test_stale_results_are_listed(tmp_path):
    current = sources.code("needle")
    for name, codes in {"a": [current, current], "b": [current, "0" * 12, ""], "c": ["0.1.0+"]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.csv").write_text(
            "experiment,made_by\n" + "".join(f"needle,{code}\n" for code in codes)
        )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "rows.csv").write_text("experiment\nneedle\n")
    assert list(stale.stale(tmp_path)) == [("b", 1, 1, 3), ("c", 1, 0, 1), ("d", 0, 1, 1)]


ROWS = [
    {"point": {"m": "a", "b": 1}, "metrics": {"e": 0.5, "e_sd": 0.01, "p": None, "low": 0.25}, "environment": {}},
    {"point": {"m": "a", "b": 2}, "metrics": {"e": 1e-7, "e_sd": None, "p": 3, "low": 0.0625}, "environment": {}},
    {"point": {"m": "b_c", "b": 2}, "metrics": {"e": 123456.0, "p": None, "low": 0.0625}, "environment": {}},
]
TABLE = table.Table("T", ("m",), ("b",), ("e", "p"), ("low",))


def test_table_shows_deviations_blanks_and_footers():
    assert table.render(ROWS, (TABLE,)) == (
        "### T\n\n"
        "| m | 1 b, e | 2 b, e | 2 b, p |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| a | 0.5 ± 0.01 | 1e-07 | 3 |\n"
        "| b_c |  | 123,456 |  |\n"
        "| *low* | 0.25 | 0.0625 |  |\n"
    )


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            "120",
            "T\n\n"
            "              1 b         2 b\n"
            "m               e        e  p\n"
            "-----------------------------\n"
            "a      0.5 ± 0.01    1e-07  3\n"
            "b_c                123,456\n"
            "*low*        0.25   0.0625\n",
        ),
        (
            "20",
            "T\n\n"
            "              1 b\n"
            "m               e\n"
            "-----------------\n"
            "a      0.5 ± 0.01\n"
            "b_c\n"
            "*low*        0.25\n"
            "\n"
            "              2 b\n"
            "m            e  p\n"
            "-----------------\n"
            "a        1e-07  3\n"
            "b_c    123,456\n"
            "*low*   0.0625\n",
        ),
    ],
)
def test_a_terminal_gets_as_many_columns_as_fit(columns, text, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert table.show(ROWS, (TABLE,)) == text


def test_tables_say_what_to_see(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    tables.make(["parameters"], tmp_path)
    out = capsys.readouterr().out
    assert run.to_see(run.configs()["parameters"]) in " ".join(out.split())
    assert f"  {tmp_path}/parameters/: table.md, rows.csv\n" in out
    assert max(map(len, out.splitlines())) <= 120 + len(str(tmp_path))
    for name, part in tables.TABLES.items():
        config = run.configs()[name]
        assert run.to_see(config).startswith("To see: ")
        grid = run.runpy.run_path(str(config))["get_config"]().grid.to_dict()
        assert all(set(values) <= set(grid[key]) for key, values in part.items())
    assert run.to_see(run.configs()["smoke"]) == ""


def test_an_unknown_table_is_one_line(monkeypatch):
    monkeypatch.chdir(ROOT)
    tables.flags.FLAGS.mark_as_parsed()
    with pytest.raises(SystemExit, match=r"^error: unknown config 'parametrs'; did you mean 'parameters'"):
        tables.main(["tables", "parametrs"])


def test_an_old_python_is_one_line(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 || exit 1\n')
    python.chmod(0o755)
    line = [shutil.which("make"), "--no-print-directory", "tables", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stdout == "expected Python 3.11 or newer, got Python 3.9.1: make PYTHON=python3.12, say\n"


@pytest.fixture
def without(monkeypatch):
    """Removes a package, and forgets the modules that have imported it."""

    def remove(package, *modules):
        monkeypatch.setitem(sys.modules, package, None)
        for name in [name for name in sys.modules if name in modules]:
            monkeypatch.delitem(sys.modules, name)
            parent, _, child = name.rpartition(".")
            monkeypatch.delattr(sys.modules[parent], child)

    return remove


def message(package, extra):
    return rf"^{package} is not installed, it comes with the extra {extra}: pip install -e '\.\[{extra}\]'$"


def test_a_missing_extra_is_one_line(without, command, tmp_path):
    """Missing extras are met before anything has run. HDF5 files: tests/experiments/test_vector_files.py."""
    without("matplotlib", "experiments.harness.plot", "experiments.codes.distortion")
    with pytest.raises(extras.MissingExtra, match=message("matplotlib", "experiments")):
        command("--config=configs/codes/smoke.py", f"--workdir={tmp_path}")
    without("tokenizers", "experiments.models.models", "experiments.data.text")
    for check in (samples.check, lambda name: exchange_theory.check({"data": name})):
        with pytest.raises(extras.MissingExtra, match=message("tokenizers", "flax")):
            check("kv")
    without("wordllama")
    with pytest.raises(extras.MissingExtra, match=message("wordllama", "real")):
        samples.check("wordllama")
    without("flax", "rqjax.nn")
    with pytest.raises(extras.MissingExtra, match=message("flax", "flax")):
        __import__("rqjax.nn")
    without("gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(extras.MissingExtra, match=message("gguf", "real")):
        load_decoder(tmp_path / "x.gguf")
    for package in ("faiss", "turbovec"):
        without(package)
        with pytest.raises(extras.MissingExtra, match=message(package, "bench")):
            search.check(next(name for name in peers.PEERS if name.startswith(package)))


def test_other_missing_modules_are_what_they_are():
    with pytest.raises(ModuleNotFoundError, match="No module named 'nothere'"), extras.explained():
        __import__("nothere")


def test_commands_say_it_in_one_line():
    code = (
        "import sys, runpy; sys.modules['flax'] = None; runpy.run_module('experiments.generate', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: flax is not installed, it comes with the extra flax: pip install -e '.[flax]'\n"


def test_extras_are_those_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {"absl-py": "absl", "faiss-cpu": "faiss"}
    for extra, packages in extras.EXTRAS.items():
        found = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in declared[extra]} - {"rqjax"}
        assert {names.get(name, name) for name in found} == set(packages)
