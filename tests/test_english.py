"""Docstrings begin with a verb or the noun they document, and their sentences are short."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("rqjax", "pallas_kernels", "experiments", "configs", "tests")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
NEVER_FIRST = """
about above after against as at before behind below beside between beyond by for from how if in into like of on out over
since than that those to under until what whatever when where whether which while who whose why with within without
""".split()  # noqa: SIM905
"""Prepositions, relatives and conjunctions: what is documented comes first."""
MOST_WORDS = 30


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring, those of fields and constants too."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of a docstring's prose: no examples, tables, commands or lists of names."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if not re.search(r"^\s*(>>>|\||    |\w+:$)", paragraph, re.MULTILINE):
            yield from re.split(r"(?<=[.:;?!])\s+(?=[A-Z`(\"])", " ".join(paragraph.split()))


def texts(folder: str) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each docstring below a folder."""
    for path in FILES:
        place = path.relative_to(ROOT)
        if place.parts[0] == folder:
            yield from ((f"{place}:{line}", text) for line, text in docstrings(path))


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_what_they_document(folder):
    wrong = [
        f"{place}: {text[:60]!r}"
        for place, text in texts(folder)
        if (first := re.match(r"[A-Za-z]+", text)) and first[0].lower() in NEVER_FIRST
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_sentences_are_short(folder):
    wrong = [
        f"{place}: {sentence[:80]!r}"
        for place, text in texts(folder)
        for sentence in sentences(text)
        if len(sentence.split()) > MOST_WORDS
    ]
    assert wrong == []
