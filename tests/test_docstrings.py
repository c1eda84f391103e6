"""Docstrings of all public callables have an example, and the examples are true."""

import doctest
import inspect

import pytest

import rqjax
from tests.tools.suites import some

NAMES = [name for name in dict.fromkeys(rqjax.__all__) if callable(getattr(rqjax, name))]
UNSAID = {"Unsupported", "UnknownName", "Quantizer", "static", "Codes"}
"""Errors, and what has its example elsewhere."""


@pytest.mark.parametrize("name", some([name for name in NAMES if name not in UNSAID], ["eden", "append"]))
def test_examples_are_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(rqjax, name))
    assert ">>> " in text
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    printed = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert not printed, "".join(printed)
