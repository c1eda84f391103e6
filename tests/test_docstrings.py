"""Docstrings of all public callables have an example, and the examples are true."""

import doctest
import inspect

import pytest

import rqjax
from tests.tools.suites import some

NAMES = [name for name in dict.fromkeys(rqjax.__all__) if callable(getattr(rqjax, name))]
UNSAID = {"Unsupported", "UnknownName", "Quantizer", "static", "Codes"}
"""Errors, and what has its example elsewhere."""
GENERATED = {*rqjax.METHODS, *rqjax.FITTED} - {"eden", "turboquant_mixed", "klt_trellis", "oscar"}
"""Recipes whose example is the text of these, filled in."""


@pytest.mark.parametrize("name", some([name for name in NAMES if name not in UNSAID | GENERATED], ["eden", "append"]))
def test_examples_are_true(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = inspect.getdoc(getattr(rqjax, name))
    assert ">>> " in text
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    printed = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert not printed, "".join(printed)


def test_recipes_have_the_generated_example():
    assert all(f">>> q = rqjax.{name}(" in inspect.getdoc(rqjax.METHODS[name]) for name in GENERATED & {*rqjax.METHODS})
    assert all(f">>> rqjax.{name}(" in inspect.getdoc(rqjax.FITTED[name]) for name in GENERATED & {*rqjax.FITTED})
