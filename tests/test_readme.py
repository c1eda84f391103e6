"""Documents are true: examples run, figures are those of committed tables, links lead somewhere."""

import inspect
import re

import pytest

import rqjax
from experiments import readme, run
from rqjax import METHODS
from tests.tools.shallow import shallow
from tests.tools.suites import some

TEXTS = {str(path.relative_to(readme.ROOT)): path.read_text() for path in [*readme.DOCUMENTS, readme.CONFIGS]}
NOTES = {
    str(path.relative_to(readme.ROOT)): path.read_text()
    for path in [
        readme.ROOT / "WORKSPACE_NOTES.md",
        *readme.ROOT.glob("*/NOTES.md"),
        *readme.ROOT.glob("rqjax/*/NOTES.md"),
    ]
}
"""Notes on why things are as they are and, in each room, on what was tried."""
SHORT = TEXTS["README.md"]
EXAMPLES = [
    (name, i, code)
    for name, text in TEXTS.items()
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    if not re.search("^from (tunix|gemma)", code, re.MULTILINE)  # tests/nn/test_compress.py runs these
]


@pytest.mark.parametrize("example", some(range(len(EXAMPLES)), [0]), ids=lambda i: "{}-{}".format(*EXAMPLES[i][:2]))
def test_examples_run_and_print_what_they_say(example, tmp_path, monkeypatch):
    """A comment behind a print begins with what is printed, a number within 3 %, or is of lower-case words about it.

    Decoders have two layers, or three where `boundary=1` keeps the first and the last as they are.
    """
    name, _, code = EXAMPLES[example]
    monkeypatch.chdir(tmp_path)
    for model in set(re.findall(r"results/models/[\w-]+", code)):
        shallow(readme.ROOT / model, tmp_path / model, layers=3 if "boundary" in code else 2)
    before, printed = dict(METHODS), {}

    def show(*values):
        printed[inspect.currentframe().f_back.f_lineno] = " ".join(" ".join(map(str, values)).split())

    exec(compile(code, name, "exec"), {"__name__": "example", "print": show})
    for name in set(METHODS) - set(before):  # one example adds a method
        del METHODS[name]
    for number, line in enumerate(code.splitlines(), 1):
        comment = re.match(r"print\(.*\)  # ([A-Z(\[\d-].*)$", line)
        if comment:
            value = re.match(r"-?\d+(\.\d+)?", comment[1])
            if value:
                assert float(printed[number]) == pytest.approx(float(value[0]), rel=0.03)
            else:
                assert printed[number] == re.split(r"[;:]", comment[1])[0].strip()


@pytest.mark.parametrize("name", TEXTS)
def test_documents_are_fresh(name):
    text = TEXTS[name]
    assert text == (readme.configs() if name == "configs/README.md" else readme.refresh(text))


def cells(table):
    """First numbers of the cells of a table in markdown, without their deviations and signs."""
    words = (cell.split() for line in table.splitlines() if line.startswith("|") for cell in line.split("|"))
    return {word[0].replace(",", "").lstrip("-") for word in words if word}


@pytest.mark.parametrize("name", ["README.md", *(name for name in TEXTS if name.startswith("results/"))])
def test_figures_follow_from_committed_tables(name):
    """A comment behind a figure is arithmetic with numbers of tables that its paragraph, row or the row's head links,
    1, 100, 1000."""
    linked, found = set(), 0
    parts = [part.split("\n|") for part in TEXTS[name].split("\n\n")]
    for head, part in [(first, part) for first, *rows in parts for part in (first, *rows)]:
        tables = re.findall(r"\]\((?:\.\./|results/)?(\w+/table\.md)\)", f"{head}\n{part}")
        known = {"1", "100", "1000"}.union(*(cells((readme.ROOT / "results" / table).read_text()) for table in tables))
        for shown, formula in re.findall(r"(\d[\d.,]*)<!-- (.*?) -->", part):
            numbers = re.findall(r"\d[\d.]*(?:e-\d+)?", formula)
            assert set(numbers) <= known, formula
            assert re.fullmatch(r"[\d.e +*/()-]+", formula)
            decimals = len(shown.partition(".")[2])
            assert abs(float(shown.replace(",", "")) - eval(formula)) <= 0.6 * 10**-decimals, (shown, formula)
            linked.update(tables)
            found += 1
    assert len(linked) >= (30 if name == "results/README.md" else 0)
    assert found == TEXTS[name].count("<!--")  # none is broken over lines, which would not be read
    assert found >= 30 or name == "results/papers/README.md"


def test_papers_have_a_verdict_on_every_row():
    """A card's rows say what, published, ours, verdict, config and table."""
    verdicts = ("reproduces", "does not reproduce", "not the same quantity", "cannot be run here", "being measured")
    for name in [name for name in TEXTS if re.fullmatch(r"results/papers/\w+\.md", name)]:
        rows = [line.strip("| ").split(" | ") for line in TEXTS[name].splitlines() if line.startswith("|")][2:]
        assert [row for row in rows if len(row) != 6 or not row[3].startswith(verdicts)] == [], name
        assert rows or name.endswith("README.md")


@pytest.mark.parametrize("name", TEXTS | NOTES)
def test_links_and_commands_lead_somewhere(name):
    folder, text = (readme.ROOT / name).parent, (TEXTS | NOTES)[name]
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)
    assert links or name in NOTES
    for link in links:
        path, _, anchor = link.partition("#")
        assert (folder / path).exists(), link
        if anchor:
            target = (folder / path).read_text() if path else text
            titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", target, flags=re.DOTALL), re.MULTILINE)
            assert anchor in map(readme.anchor, titles), link
    commands = re.findall(r"--config=(\S+\.py)", text)
    assert [path for path in commands if "NAME" not in path and not (readme.ROOT / path).exists()] == []


def test_notes_are_short_and_name_files_that_exist():
    rooms = ("rqjax", "pallas_kernels", "experiments", "tests")
    files = [f"/{path.relative_to(readme.ROOT)}" for room in rooms for path in (readme.ROOT / room).rglob("*.py")]
    for name, text in NOTES.items():
        assert len(text.encode()) <= (25_000 if name == "WORKSPACE_NOTES.md" else 6_000), name
        assert name == "WORKSPACE_NOTES.md" or f"]({name})" in NOTES["WORKSPACE_NOTES.md"]
        named = re.findall(r"`([\w/]+\.py)`", text)
        assert [path for path in named if not any(file.endswith(f"/{path}") for file in files)] == [], name


def test_the_front_door_is_short():
    lines = SHORT.splitlines()
    assert len(lines) <= 180
    assert len(SHORT) <= 14_000
    assert any("pip install" in line for line in lines[:30])
    assert len(re.findall(r"!\[", SHORT)) >= 3
    assert len(re.findall(r"\]\(", SHORT)) >= 10
    assert len(TEXTS["results/README.md"].splitlines()) <= 400


def test_pages_of_the_guide_are_short_and_linked():
    guide = TEXTS["rqjax/README.md"]
    pages = [name for name in TEXTS if name.startswith("rqjax/docs/")]
    assert len(pages) >= 6
    for name in ("rqjax/README.md", *pages):
        assert len(TEXTS[name].splitlines()) <= 250, name
        assert name not in pages or f"]({name.removeprefix('rqjax/')})" in guide, name


def test_every_method_and_public_name_is_listed():
    guide, index = TEXTS["rqjax/README.md"], TEXTS["rqjax/docs/api.md"]
    assert [name for name in METHODS if f"`{name}`" not in guide] == []
    assert [name for name in rqjax.__all__ if f"- `{name}`: " not in index] == []
    assert len(rqjax.__doc__.splitlines()) <= 48  # one screen
    assert all(len(line) <= 120 for line in rqjax.__doc__.splitlines())


def test_committed_results_have_their_config():
    """Results have a config of their name, or one that names their folder."""
    configs = run.configs()
    texts = [path.read_text() for path in configs.values()]
    for rows in (readme.ROOT / "results").glob("*/rows.csv"):
        folder = rows.parent
        assert folder.name in configs or any(f'"workdir": "results/{folder.name}"' in text for text in texts)
        assert {"table.md", "rows.csv"} <= {path.name for path in folder.iterdir()}
        assert f"]({folder.name}/table.md)" in TEXTS["results/README.md"], f"no link to the table of {folder.name}"
