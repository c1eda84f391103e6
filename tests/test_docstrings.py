"""Docstrings of all public callables have an example, and the examples are true."""

import doctest
import inspect

import pytest

import rqjax
import rqjax.nn
from tests.tools.suites import some

NAMES = {name: getattr(rqjax, name) for name in rqjax.__all__ if callable(getattr(rqjax, name))}
NAMES |= {
    f"nn.{name}": one for name, one in vars(rqjax.nn).items() if getattr(one, "__module__", "").startswith("rqjax.nn")
}
UNSAID = {"Unsupported", "UnknownName", "Quantizer", "static", "Codes", "nn.Event", "nn.DecoderConfig"} | {
    f"nn.{name}" for name in ("LatentAttention", "find_checkpoint", "load_calibration", "save_decoder")
}
"""Names without an example: errors, and what has its example elsewhere."""
GENERATED = {*rqjax.METHODS, *rqjax.FITTED} - {"eden", "turboquant_mixed", "klt_trellis", "oscar"}
"""Recipes whose example is one of these texts, filled in."""


def texts(one):
    """The docstrings of a function or of a class and its own methods."""
    members = vars(one).values() if inspect.isclass(one) else ()
    return [inspect.getdoc(part) or "" for part in (one, *members) if part is one or inspect.isroutine(part)]


@pytest.mark.parametrize("name", some([name for name in NAMES if name not in GENERATED], ["eden", "append"]))
def test_examples_are_true(name, tmp_path, monkeypatch):
    first, *others = texts(NAMES[name])
    assert ">>> " in first or name in UNSAID
    if not name.startswith("nn."):  # those read checkpoints of this repository
        monkeypatch.chdir(tmp_path)
    printed = []
    for text in (first, *others):
        test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=printed.append)
    assert not printed, "".join(printed)


def test_recipes_have_the_generated_example():
    assert all(f">>> q = rqjax.{name}(" in inspect.getdoc(rqjax.METHODS[name]) for name in GENERATED & {*rqjax.METHODS})
    assert all(f">>> rqjax.{name}(" in inspect.getdoc(rqjax.FITTED[name]) for name in GENERATED & {*rqjax.FITTED})
