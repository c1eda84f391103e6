"""Refreshes what is generated in the documents: `python -m experiments.readme`.

The index of the API, <!-- api --> ... <!-- end -->, and all of configs/README.md come from docstrings.
"""

import ast
import csv
import inspect
import re
from pathlib import Path

import rqjax
from experiments import run

ROOT = Path(__file__).parent.parent
API = re.compile(r"(<!-- api -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in ("rqjax", "results", "experiments", "pallas_kernels")),
    *sorted((ROOT / "results" / "papers").glob("*.md")),
]
CONFIGS = ROOT / "configs" / "README.md"
ABOVE = """# Configs

Each config is a grid, run by `python -m experiments.run NAME`. Its file lies in the room of its experiment. This page
is generated from the docstrings by `python -m experiments.readme`. Minutes are the time that the rows in
[results/](../results/README.md) took, on two hardware threads.

| config | what it is about | minutes | extras |
| --- | --- | ---: | --- |
"""


def refresh(text: str) -> str:
    """`text` with the index of the API replaced by today's."""
    return API.sub(lambda m: f"{m[1]}\n{api()}\n\n{m[2]}", text)


def api() -> str:
    """Returns a line for each public name: the first paragraph of its docstring."""
    names = dict.fromkeys(rqjax.__all__)
    first = {name: (inspect.getdoc(getattr(rqjax, name)) or "").partition("\n\n")[0].split() for name in names}
    return "\n".join(f"- `{name}`: {' '.join(words)}" for name, words in first.items())


def configs() -> str:
    """Returns the text of configs/README.md."""
    return ABOVE + "\n".join(map(_line, run.configs().values())) + "\n"


def _line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    extras = ", ".join(f"`{name}`" for name in re.findall(r"extra `(\w+)`", text))
    about = " ".join([text.partition("\n\n")[0].replace("\n", " "), run.to_see(path)]).strip()
    return f"| [{path.stem}]({path.relative_to(CONFIGS.parent)}) | {about} | {_minutes(path.stem)} | {extras} |"


def _minutes(name: str) -> str:
    """Returns the minutes that the committed rows of a config took."""
    path = ROOT / "results" / name / "rows.csv"
    if not path.exists():
        return ""
    with path.open(newline="") as file:
        seconds = sum(float(row.get("seconds") or 0) for row in csv.DictReader(file))
    return f"{seconds / 60:.0f}" if seconds > 30 else "< 1"


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(refresh(document.read_text()))
    CONFIGS.write_text(configs())
