"""Refreshes what is generated in the documents: `python -m experiments.readme`.

The index of the API (<!-- api --> ... <!-- end --> in rqjax/docs/api.md) and all of configs/README.md come from
docstrings.
"""

import ast
import csv
import inspect
import re
from pathlib import Path
from types import ModuleType

import rqjax
import rqjax.nn
from experiments import run

ROOT = Path(__file__).parent.parent
API = re.compile(r"(<!-- api -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in ("rqjax", "results", "experiments", "pallas_kernels")),
    *sorted((ROOT / "rqjax" / "docs").glob("*.md")),
    *sorted((ROOT / "results" / "papers").glob("*.md")),
]
CONFIGS = ROOT / "configs" / "README.md"
ABOUT = {
    "METHODS": "Recipes `recipe(key, dim, bits)` that need no data, by name: `eden` and those after it.",
    "FITTED": "Recipes `recipe(key, x, bits)` that learn from samples, by name: `klt_trellis` and those after it.",
    "BUDGETED": "Methods of `fit_under_budget`, by name.",
    "STRATEGIES": "Strategies with a name of their own, by name: number formats, KIVI, KVarN, TurboQuant MLX's.",
    "Codes": "Type of codes: a pytree of arrays, each with the leading axes of the vectors.",
}
"""Sentences for public names that cannot have a docstring of their own."""
ABOVE = """# Configs

Each config is a grid, run by `python -m experiments.run NAME`. Its file lies in the room of its experiment. This page
is generated from the docstrings by `python -m experiments.readme`. Minutes are the time that the rows in
[results/](../results/README.md) took, on two hardware threads. All need the extra `experiments`, those in `language`
`flax`, too.

| config | what it is about | minutes | extras |
| --- | --- | ---: | --- |
"""


def refresh(text: str) -> str:
    """`text` with the index of the API replaced by today's."""
    return API.sub(lambda m: f"{m[1]}\n{api()}\n\n{m[2]}", text)


def api() -> str:
    """Returns a line for each public name, the first paragraph of its docstring, below the headings of rqjax's map."""
    parts = {heading: _entries(rqjax, names) for heading, names in groups().items()}
    parts["rqjax.nn (extra `flax`)"] = _entries(rqjax.nn, _names_of_nn())
    links = "\n".join(f"- [{heading}](#{anchor(heading)})" for heading in parts)
    return "\n\n".join([links, *(f"## {heading}\n\n{entries}" for heading, entries in parts.items())])


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")


def groups() -> dict[str, list[str]]:
    """Returns the public names below each heading of the map in rqjax's docstring."""
    found: dict[str, list[str]] = {}
    left, heading = dict.fromkeys(rqjax.__all__), ""
    for line in (rqjax.__doc__ or "").split("\n\n")[2].splitlines():
        if not line.startswith(" "):
            heading = line
        for name in re.findall(r"\w+", line if line.startswith(" ") else ""):
            if name in left:
                found.setdefault(heading, []).append(name)
                del left[name]
    return found


def _names_of_nn() -> list[str]:
    """Returns the public names of rqjax.nn, which has no map."""
    own = (name for name, one in vars(rqjax.nn).items() if getattr(one, "__module__", "").startswith("rqjax.nn"))
    return sorted(own, key=str.lower)


def _entries(module: ModuleType, names: list[str]) -> str:
    texts = {name: ABOUT.get(name) or inspect.getdoc(getattr(module, name)) or "" for name in names}
    first = {name: text.partition("\n\n")[0].split() for name, text in texts.items()}
    return "\n".join(f"- `{name}`: {' '.join(words)}" for name, words in first.items())


def configs() -> str:
    """Returns the text of configs/README.md."""
    return ABOVE + "\n".join(map(_line, run.configs().values())) + "\n"


def _line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    named = " ".join(re.findall(r"extras?\s+(`\w+`(?:\s+and\s+`\w+`)?)", text))
    extras = ", ".join(re.findall(r"`\w+`", named))
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
