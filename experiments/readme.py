"""Refreshes the documents, what is generated in them and of them: `python -m experiments.readme`.

Tables come from the committed results: a marker names a file and the title of a table in it,
<!-- table: results/smoke/table.md, Title --> ... <!-- end -->. The index of the API, <!-- api --> ... <!-- end -->, and
all of configs/README.md come from docstrings.
"""

import ast
import csv
import inspect
import re
from pathlib import Path

import rqjax
from experiments import run

ROOT = Path(__file__).parent.parent
TABLE = re.compile(r"(<!-- table: (\S+), (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
API = re.compile(r"(<!-- api -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in ("rqjax", "results", "experiments", "pallas_kernels")),
]
CONFIGS = ROOT / "configs" / "README.md"
ABOVE = """# Configs

Each file is a grid and says what it is for: `python -m experiments.run NAME`. Files lie in the room of the experiment
that they run. Generated from their docstrings by `python -m experiments.readme`; minutes are those that the rows in
[results/](../results/README.md) took, on two hardware threads.

| config | what it is about | minutes | extras |
| --- | --- | ---: | --- |
"""


def section(text: str, title: str) -> str:
    """The table with this title."""
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        if name == title:
            return body.strip()
    raise ValueError(f"there is no table {title!r}")


def refresh(text: str) -> str:
    """`text` with every marked table replaced by the committed one, and the index of the API by today's."""
    text = TABLE.sub(lambda m: f"{m[1]}\n{section((ROOT / m[2]).read_text(), m[3])}\n\n{m[4]}", text)
    return API.sub(lambda m: f"{m[1]}\n{api()}\n\n{m[2]}", text)


def api() -> str:
    """A line for each public name: the first one of its docstring."""
    names = dict.fromkeys(rqjax.__all__)
    first = {name: (inspect.getdoc(getattr(rqjax, name)) or "").partition("\n\n")[0].split() for name in names}
    return "\n".join(f"- `{name}`: {' '.join(words)}" for name, words in first.items())


def configs() -> str:
    """configs/README.md."""
    return ABOVE + "\n".join(map(_line, run.configs().values())) + "\n"


def _line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    extras = ", ".join(f"`{name}`" for name in re.findall(r"extra `(\w+)`", text))
    about = " ".join([text.partition("\n\n")[0].replace("\n", " "), run.to_see(path)]).strip()
    return f"| [{path.stem}]({path.relative_to(CONFIGS.parent)}) | {about} | {_minutes(path.stem)} | {extras} |"


def _minutes(name: str) -> str:
    """That the committed rows of a config took."""
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
