"""What README.md says is true: its example runs, its tables are the committed ones, its links lead somewhere."""

import re

import pytest

from experiments import readme
from rqjax import METHODS
from tests.tools.suites import some

TEXT = (readme.ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", some(range(len(EXAMPLES)), [0]))
def test_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(readme.ROOT / "results")
    before = dict(METHODS)
    exec(compile(EXAMPLES[example], "README.md", "exec"), {})
    for name in set(METHODS) - set(before):  # one example adds a method
        del METHODS[name]


def test_tables_are_the_committed_ones():
    assert len(readme.MARKER.findall(TEXT)) >= 5
    assert readme.refresh(TEXT) == TEXT


def test_links_and_commands_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT) + re.findall(r"--config=(\S+\.py)", TEXT)
    assert len(links) > 5
    assert [link for link in links if not (readme.ROOT / link).exists()] == []


def test_every_method_is_listed():
    assert [name for name in METHODS if f"`{name}`" not in TEXT] == []


def test_committed_results_have_their_config():
    """One of their name, or one that says that they go there."""
    texts = [path.read_text() for path in (readme.ROOT / "configs").glob("*.py")]
    for rows in (readme.ROOT / "results").glob("*/rows.csv"):
        folder = rows.parent
        named = (readme.ROOT / "configs" / f"{folder.name}.py").exists()
        assert named or any(f'"workdir": "results/{folder.name}"' in text for text in texts)
        assert {"table.md", "rows.csv"} <= {path.name for path in folder.iterdir()}
