"""What the documents say is true: examples run, tables are the committed ones, links lead somewhere."""

import inspect
import re

import pytest

import rqjax
from experiments import readme
from rqjax import METHODS
from tests.tools.suites import some

TEXTS = {str(path.relative_to(readme.ROOT)): path.read_text() for path in [*readme.DOCUMENTS, readme.CONFIGS]}
SHORT = TEXTS["README.md"]
EXAMPLES = [
    (name, i, code)
    for name, text in TEXTS.items()
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    if not re.search("^from (tunix|gemma)", code, re.MULTILINE)  # tests/nn/test_compress.py runs these
]


@pytest.mark.parametrize("example", some(range(len(EXAMPLES)), [0]), ids=lambda i: "{}-{}".format(*EXAMPLES[i][:2]))
def test_examples_run_and_print_what_they_say(example, tmp_path, monkeypatch):
    """A comment behind a print begins with what is printed, a number within 3 %, or is of lower-case words about it."""
    name, _, code = EXAMPLES[example]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(readme.ROOT / "results")
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


def test_tables_are_shown():
    assert len(readme.TABLE.findall(TEXTS["results/README.md"])) >= 20


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_commands_lead_somewhere(name):
    folder, text = (readme.ROOT / name).parent, TEXTS[name]
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        assert (folder / path).exists(), link
        if anchor:
            target = (folder / path).read_text() if path else text
            titles = re.findall(r"^#+ (.*)$", target, re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles], link
    commands = re.findall(r"--config=(\S+\.py)", text)
    assert [path for path in commands if "NAME" not in path and not (readme.ROOT / path).exists()] == []


def test_the_front_door_is_short():
    lines = SHORT.splitlines()
    assert len(lines) <= 200
    assert len(SHORT) <= 14_000
    assert any("pip install" in line for line in lines[:30])
    assert len(re.findall(r"!\[", SHORT)) >= 3
    assert len(re.findall(r"\]\(", SHORT)) >= 10


def test_every_method_and_public_name_is_listed():
    guide = TEXTS["rqjax/README.md"]
    assert [name for name in METHODS if f"`{name}`" not in guide] == []
    assert len(rqjax.__doc__.splitlines()) <= 48  # one screen
    assert all(len(line) <= 120 for line in rqjax.__doc__.splitlines())


def test_committed_results_have_their_config():
    """One of their name, or one that says that they go there."""
    texts = [path.read_text() for path in (readme.ROOT / "configs").glob("*.py")]
    for rows in (readme.ROOT / "results").glob("*/rows.csv"):
        folder = rows.parent
        named = (readme.ROOT / "configs" / f"{folder.name}.py").exists()
        assert named or any(f'"workdir": "results/{folder.name}"' in text for text in texts)
        assert {"table.md", "rows.csv"} <= {path.name for path in folder.iterdir()}
        assert f"{folder.name}/" in TEXTS["results/README.md"], f"no word of {folder.name}"
