"""Puts the committed tables into README.md, between their markers: `python -m experiments.readme`.

A marker names a file and the title of a table in it: <!-- table: results/smoke/table.md, Title --> ... <!-- end -->
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARKER = re.compile(r"(<!-- table: (\S+), (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def section(text: str, title: str) -> str:
    """The table with this title."""
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        if name == title:
            return body.strip()
    raise ValueError(f"there is no table {title!r}")


def refresh(text: str) -> str:
    """`text` with every marked table replaced by the committed one."""
    return MARKER.sub(lambda m: f"{m[1]}\n{section((ROOT / m[2]).read_text(), m[3])}\n\n{m[4]}", text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(refresh(readme.read_text()))
